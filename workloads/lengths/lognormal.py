"""Writes heavy-tail-lognormal.txt: 256 lengths, 700 * exp(1.2 * normal), rounded and clipped to 200..16384.

    pip install numpy==2.2.6 && python3 workloads/lengths/lognormal.py

The file is committed because numpy's normal generator (PCG64, ziggurat) is not worth writing again.
"""
import pathlib

import numpy as np

normal = np.random.default_rng(0).standard_normal(256)
lengths = np.clip(np.rint(700 * np.exp(1.2 * normal)), 200, 16384).astype(np.int64)
path = pathlib.Path(__file__).with_name("heavy-tail-lognormal.txt")
path.write_text("".join(f"{n}\n" for n in lengths))
