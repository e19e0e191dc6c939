"""Measures the schedule kernel: device.py's counterpart for it. Needs a GPU and PyTorch.

    python3 schedule_device.py CUBIN [CUBIN ...]

Every cubin holds a jfa_schedule. Its lists are checked first.
Columns, in microseconds:
    graph    a graph of 200 launches, over 200: what the kernel takes behind other work
    event    event pair around one launch, after an overwrite of the L2, minus the pair around an empty kernel
    empty    that pair around an empty kernel
With `profile` as last argument each shape is only launched twice, for
`ncu --clock-control none --metrics gpu__time_duration.sum --kernel-name jfa_schedule`.
"""
import os
import sys

import torch

from device import Kernel, Mask, ScheduleParams, launch_schedule

TILE_ROWS, TILE_KEYS, KEYS, Q_TILE, HEADS = 128, 128, 128, 64, 4
SMS = 132


class Schedule:
    def __init__(self, lq, lk, mask=(-1, -1, 0)):
        dev = lambda x: torch.tensor(x, dtype=torch.int32, device="cuda")
        total = lambda x: torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor(x).cumsum(0)]).to(torch.int32).cuda()
        self.lq, self.lk, self.batch = lq, lk, len(lq)
        self.oq, self.ok = total(lq), total(lk)
        rows, keys = sum(lq), sum(lk)
        self.capacity, self.backward = rows // TILE_ROWS + self.batch, keys // KEYS + self.batch
        self.buffer = torch.full((256 + 32 * self.batch + 8 * (self.capacity + self.backward),), 0x7f, dtype=torch.uint8, device="cuda")
        base = self.buffer.data_ptr()
        lists = base + 256 + 32 * self.batch
        self.params = ScheduleParams(
            self.oq.data_ptr(), self.ok.data_ptr(), None, None, None, base, base + 256, lists, lists + 8 * self.capacity, rows, keys,
            self.batch, self.batch, 0, 0, -1, TILE_ROWS, TILE_KEYS, self.capacity, KEYS, Q_TILE, self.backward, 0, Mask(*mask), -(-SMS // HEADS))

    def wrong(self):
        """What is wrong with the lists, in words; empty when nothing is."""
        words = self.buffer.view(torch.int32)
        forward, backward = words[:2].tolist()
        sequences = words[64:64 + 8 * self.batch].view(-1, 8)
        at = 64 + 8 * self.batch
        first = words[at:at + 2 * forward].view(-1, 2).cpu()
        second = words[at + 2 * self.capacity:at + 2 * self.capacity + 2 * backward].view(-1, 2).cpu()
        lq, lk = torch.tensor(self.lq), torch.tensor(self.lk)
        if not (torch.equal(sequences[:, 2].cpu(), lq.int()) and torch.equal(sequences[:, 4].cpu(), lk.int())):
            return "lengths"
        units = (lq + TILE_ROWS - 1) // TILE_ROWS
        sequence = torch.repeat_interleave(torch.arange(self.batch), units)
        expected = torch.stack([sequence, (torch.arange(len(sequence)) - (units.cumsum(0) - units)[sequence]) * TILE_ROWS], 1)
        key = lambda t: (t[:, 0].long() << 32 | t[:, 1].long() + 1).sort().values
        if forward != int(units.sum()) or not torch.equal(key(first), key(expected)):
            return f"forward list ({forward} units, expected {int(units.sum())})"
        tiles = (lk + KEYS - 1) // KEYS
        tiles = torch.where((tiles == 0) & (lq > 0), 1, tiles)
        whole = second[:, 1] == -1
        count = torch.zeros(self.batch, dtype=torch.int64).index_add_(0, second[:, 0].long(), torch.ones(backward, dtype=torch.int64))
        single = torch.zeros(self.batch, dtype=torch.bool)
        single[second[whole, 0].long()] = True
        if not torch.equal(count, torch.where(single & (tiles > 0), 1, tiles)) or len(key(second).unique()) != backward:
            return f"backward list ({backward} units)"
        return ""


def launcher(path):
    kernel = Kernel(path, "jfa_schedule")
    return lambda s: launch_schedule(kernel, s.params)


def in_graph(launch, n=200, rounds=20):
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        launch()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(n):
                launch()
        best = []
        for _ in range(rounds):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            graph.replay()
            b.record()
            b.synchronize()
            best.append(a.elapsed_time(b) * 1e3 / n)
    return sorted(best)[rounds // 2]


def pair(launch, reps=40):
    flush = pair.__dict__.setdefault("flush", torch.empty(256 << 20, dtype=torch.int8, device="cuda"))
    pairs = []
    for _ in range(reps):
        flush.zero_()
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        launch()
        b.record()
        pairs.append((a, b))
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) * 1e3 for a, b in pairs)[reps // 2]


def cases():
    uniform = lambda n, m, seed: torch.randint(1, m + 1, (n,), generator=torch.Generator().manual_seed(seed)).tolist()
    causal = (-1, 0, 0)
    for m in (256, 2048):
        yield f"half-{m}", Schedule(*2 * [uniform(1152, m, 2025 + m)])
    yield "half-2048-causal", Schedule(*2 * [uniform(1152, 2048, 2025 + 2048)], causal)
    yield "full-256", Schedule([256] * 1152, [256] * 1152)
    yield "full-2048", Schedule([2048] * 1152, [2048] * 1152)
    yield "8192 x 34", Schedule([34] * 8192, [34] * 8192)
    yield "8192 mean 34", Schedule(*2 * [uniform(8192, 67, 5)])
    yield "one-16384", Schedule([16384] + [100] * 255, [16384] + [100] * 255)
    yield "20000 mean 34", Schedule(*2 * [uniform(20000, 67, 5)])
    yield "1000000 x 4", Schedule([4] * 1000000, [4] * 1000000)


def main(paths, profile):
    launchers = [(os.path.basename(p), launcher(p)) for p in paths]
    if profile:
        for name, s in cases():
            for kernel, launch in launchers:
                print(name, kernel, flush=True)
                launch(s)
                launch(s)
                torch.cuda.synchronize()
        return 0
    empty = lambda: torch.cuda._sleep(0)
    bad = 0
    print(f"empty kernel: graph {in_graph(empty):.2f}, event {pair(empty):.2f}")
    for name, s in cases():
        for kernel, launch in launchers:
            s.buffer.fill_(0x7f)
            launch(s)
            torch.cuda.synchronize()
            wrong = s.wrong()
            bad += bool(wrong)
            few = s.batch > 100000
            t = (in_graph(lambda: launch(s), 10 if few else 200), pair(lambda: launch(s)), pair(empty))
            print(f"  {name:18s} {kernel:22s} graph {t[0]:7.2f}  event {t[1] - t[2]:7.2f}  empty {t[2]:5.2f}  {wrong or 'ok'}", flush=True)
    return bad


if __name__ == "__main__":
    profile = sys.argv[-1] == "profile"
    torch.zeros(1, device="cuda")
    sys.exit(main(sys.argv[1:-1] if profile else sys.argv[1:], profile))
