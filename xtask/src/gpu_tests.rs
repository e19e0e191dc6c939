//! `cargo xtask gpu-tests`.

use anyhow::Result;

use crate::Places;

#[derive(clap::Args)]
pub struct Options {}

pub fn run(_: &Places, _: &Options) -> Result<()> {
    anyhow::bail!("in work")
}
