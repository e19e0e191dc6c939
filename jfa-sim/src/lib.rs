//! A functional simulator for PTX.
