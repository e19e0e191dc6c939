//! Sizes of tiles, and the schedule: which work there is in a batch and in what order threads take it.
//!
//! The unit of bookkeeping is a key/value sequence with everything that attends to it. Its *lanes* are all query rows
//! that share one of its heads: every row of every query head of the group of every sequence attending to it, in the
//! order (sequence, head, row). Heads of one key/value sequence differ in nothing but addresses, so the schedule has one
//! [`Entry`] for a key/value sequence, and work items are numbered through `entry, key/value head, tile`.
//!
//! Everything that decides how sums are grouped (tiles, chunks, bundles) follows from lengths alone, never from the
//! number of threads or, for rows of a sequence, from the rest of the batch.

use crate::layout::Sequences;
use crate::{Alignment, Bias, Buffer, Error, Mask, Problem, Requirements, Result};

/// Most lanes of a forward tile.
pub(super) const FORWARD_LANES: usize = 128;
/// Most lanes of a backward tile.
pub(super) const BACKWARD_LANES: usize = 96;
/// Key tiles of a backward chunk: the keys whose gradients one work item keeps in scratch.
const CHUNK_TILES: usize = 4;
/// Lane tiles of a backward item.
const STRETCH_TILES: i64 = 16;
/// Most bundles of a pass, so most threads that can share it.
pub(super) const BUNDLES: usize = 4096;
/// Bytes that partial sums of positional bias gradients may take before there are fewer, larger bundles.
const PARTIAL_BYTES: usize = 64 << 20;
/// Multiply-adds below which a bundle is not worth handing to a thread.
const BUNDLE_WORK: i64 = 1 << 20;

/// Dimensions of a problem as the kernels use them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub dim: usize,
    pub dim_v: usize,
    /// `dim` padded to whole vectors of any instruction set.
    pub dim_padded: usize,
    /// `dim_v` padded likewise.
    pub dim_v_padded: usize,
    /// Distance of rows in scratch. Not a multiple of 64 bytes' powers of two, lest columns fall into few cache sets.
    pub ld: usize,
    /// As `ld`, for values.
    pub ld_v: usize,
    pub heads_kv: i64,
    pub group: i64,
    key_tile: usize,
}

impl Shape {
    pub(super) fn new(problem: &Problem) -> Self {
        let (dim, dim_v) = (problem.head_dim as usize, problem.head_dim_v as usize);
        let (dim_padded, dim_v_padded) = (dim.next_multiple_of(16), dim_v.next_multiple_of(16));
        Shape {
            dim,
            dim_v,
            dim_padded,
            dim_v_padded,
            ld: dim_padded + 16,
            ld_v: dim_v_padded + 16,
            heads_kv: problem.heads_kv,
            group: problem.group(),
            // Keeps the tiles of K and V, 0.25 MiB at most, in the second-level cache. Multiples of 12, the tallest
            // register tile.
            key_tile: match dim.max(dim_v) {
                ..=128 => 120,
                129..=256 => 96,
                _ => 60,
            },
        }
    }

    /// Most keys of a tile.
    pub(super) fn key_tile_max(&self) -> usize {
        self.key_tile
    }

    /// Keys of a tile of a sequence of `keys`: equal tiles, as few as the maximum allows.
    pub(super) fn key_tile(&self, keys: i64) -> i64 {
        let tiles = div_up(keys, self.key_tile as i64).max(1);
        div_up(div_up(keys, tiles).max(1), 6) * 6
    }

    /// Most keys of a backward chunk.
    pub(super) fn chunk_max(&self) -> usize {
        CHUNK_TILES * self.key_tile
    }

    /// Keys of a backward chunk of a sequence of `keys`.
    pub(super) fn chunk(&self, keys: i64) -> i64 {
        CHUNK_TILES as i64 * self.key_tile(keys)
    }

    /// Backward chunks: one also without keys, when there are lanes whose `dq` is to be written.
    pub(super) fn chunks(&self, keys: i64, lanes: i64) -> i64 {
        // Short ones, nearly all, without a division.
        if keys > self.chunk_max() as i64 { div_up(keys, self.chunk(keys)) } else { i64::from(keys > 0 || lanes > 0) }
    }
}

/// `ceil(a / b)`.
pub(super) fn div_up(a: i64, b: i64) -> i64 {
    a / b + i64::from(a % b != 0)
}

/// Lanes of a tile where `lanes` are cut into equal tiles, as few as `max` allows.
pub(super) fn lane_tile(lanes: i64, max: usize) -> i64 {
    let tiles = div_up(lanes, max as i64).max(1);
    // 16 divides both maxima, so rounding up cannot exceed them.
    div_up(div_up(lanes, tiles).max(1), 16) * 16
}

/// Tiles of `lanes`.
pub(super) fn lane_tiles(lanes: i64, max: usize) -> i64 {
    if lanes > max as i64 { div_up(lanes, lane_tile(lanes, max)) } else { i64::from(lanes > 0) }
}

/// Lanes of a backward item: a *stretch* of [`STRETCH_TILES`] tiles.
pub(super) fn stretch(lanes: i64) -> i64 {
    STRETCH_TILES * lane_tile(lanes, BACKWARD_LANES)
}

/// Most lanes of a backward item of any sequence.
pub(super) fn stretch_max() -> i64 {
    STRETCH_TILES * BACKWARD_LANES as i64
}

/// Stretches: one also without lanes, when there are keys whose gradients (zeros) are to be written.
pub(super) fn stretches(lanes: i64, keys: i64) -> i64 {
    if lanes > stretch_max() { div_up(lanes, stretch(lanes)) } else { i64::from(lanes > 0 || keys > 0) }
}

/// A key/value sequence and what attends to it. `*_first` number items and turns through the batch.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Entry {
    pub kv: i64,
    pub keys: i64,
    /// Lanes of each head.
    pub lanes: i64,
    cost: i64,
    forward_first: i64,
    backward_first: i64,
    /// A turn for each (head, lane tile): chunks add their share of `dq` in order.
    pub q_turn_first: i64,
    /// A turn for each (head, chunk): stretches add their share of `dk` and `dv` in order.
    pub kv_turn_first: i64,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Header {
    magic: u64,
    /// [`fingerprint`] of what it was built for.
    built_for: u64,
    batch: i64,
    kv_batch: i64,
    forward_items: i64,
    backward_items: i64,
    forward_bundles: i64,
    backward_bundles: i64,
    q_turns: i64,
    kv_turns: i64,
    cost: i64,
}

const MAGIC: u64 = 0x6a66_615f_6370_7531;

/// Stands for everything that items, turns and the places of a schedule's parts follow from: the plan's dimensions and capacities,
/// and the lengths of the batch. A schedule used with others would name rows that do not exist.
fn fingerprint(problem: &Problem, shape: &Shape, sequences: &Sequences) -> u64 {
    let mut hash = 0u64;
    let mut add = |n: i64| hash = (hash ^ n as u64).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    for n in [shape.dim as i64, shape.dim_v as i64, shape.heads_kv, shape.group, problem.batch, problem.kv_batch] {
        add(n);
    }
    add(bias_table(problem));
    add(i64::from(problem.uses_kv_index));
    for b in 0..sequences.len() {
        let s = sequences.get(b);
        add(s.q_len);
        add(s.kv_sequence as i64);
    }
    for kv in 0..sequences.kv_len() {
        add(sequences.kv(kv).len);
    }
    hash
}

/// Where the parts of the schedule stand in the caller's buffer, from capacities alone.
#[derive(Clone, Copy, Debug)]
pub(super) struct ScheduleLayout {
    entries: usize,
    forward_bounds: usize,
    backward_bounds: usize,
    member_start: usize,
    members: usize,
    rows_before: usize,
    /// Size of the whole.
    pub bytes: usize,
    /// Most bundles of a backward: each has its partial sums of a positional bias gradient.
    pub backward_bundles: usize,
}

impl ScheduleLayout {
    pub(super) fn new(problem: &Problem) -> Result<Self> {
        let too_large = || Error::invalid("batch", problem.batch, "the schedule would not fit in the address space");
        let (batch, kv_batch) = (problem.batch as usize, problem.kv_batch as usize);
        let mut end = 0usize;
        let mut take = |count: usize, size: usize| {
            let start = end;
            let bytes = count.checked_mul(size).and_then(|b| b.checked_next_multiple_of(64));
            end = bytes.and_then(|b| end.checked_add(b)).ok_or_else(too_large)?;
            Ok::<_, Error>(start)
        };
        let table = bias_table(problem) as usize * problem.heads_q as usize * size_of::<f64>();
        let backward_bundles = PARTIAL_BYTES.checked_div(table).map_or(BUNDLES, |tables| tables.clamp(16, 256));
        take(1, size_of::<Header>())?;
        let entries = take(kv_batch, size_of::<Entry>())?;
        let forward_bounds = take(BUNDLES + 2, 8)?;
        let backward_bounds = take(backward_bundles + 2, 8)?;
        let shared = problem.uses_kv_index;
        let member_start = take(if shared { kv_batch + 1 } else { 0 }, 8)?;
        let members = take(if shared { batch } else { 0 }, 8)?;
        let rows_before = take(if shared { batch } else { 0 }, 8)?;
        Ok(ScheduleLayout {
            entries,
            forward_bounds,
            backward_bounds,
            member_start,
            members,
            rows_before,
            bytes: end,
            backward_bundles: backward_bundles + 1,
        })
    }
}

/// Entries of a head in a positional bias's gradient: 0 where there is none.
pub(super) fn bias_table(problem: &Problem) -> i64 {
    match problem.bias {
        Bias::None | Bias::Dense { .. } => 0,
        Bias::Alibi => 1,
        Bias::Relative { radius } => 2 * i64::from(radius) + 1,
    }
}

/// The alignment of the bias's diagonal.
pub(super) fn bias_alignment(problem: &Problem) -> Alignment {
    problem.mask.alignment().unwrap_or(problem.bias_alignment)
}

/// Most turns of any layout within the capacities: of `dq` and of `dk`, `dv`.
pub(super) fn most_turns(problem: &Problem, shape: &Shape) -> (i64, i64) {
    let lanes = problem.o_rows().saturating_mul(shape.group);
    // A tile holds at least half of the most lanes, except for one tile of each sequence; chunks likewise.
    let q = (lanes / (BACKWARD_LANES as i64 / 2)).saturating_add(problem.kv_batch);
    let kv = (problem.total_kv / (shape.chunk_max() as i64 / 2)).saturating_add(problem.kv_batch);
    (q.saturating_mul(shape.heads_kv), kv.saturating_mul(shape.heads_kv))
}

/// A schedule in the caller's buffer.
#[derive(Clone, Copy)]
pub(super) struct Schedule<'a> {
    pub entries: &'a [Entry],
    /// Item numbers: bundle i is items `bounds[i] .. bounds[i + 1]`.
    pub forward_bounds: &'a [i64],
    pub backward_bounds: &'a [i64],
    pub q_turns: i64,
    pub kv_turns: i64,
    /// Estimated visible pairs of all query heads of one key/value head, times the heads.
    pub cost: i64,
    members: Option<Members<'a>>,
}

#[derive(Clone, Copy)]
struct Members<'a> {
    start: &'a [i64],
    members: &'a [i64],
    rows_before: &'a [i64],
}

/// An item of the forward: a tile of lanes.
#[derive(Clone, Copy, Debug)]
pub(super) struct ForwardItem {
    pub entry: Entry,
    pub head_kv: i64,
    pub first_lane: i64,
    pub lanes: usize,
}

/// An item of the backward: a stretch of lanes by a chunk of keys.
#[derive(Clone, Copy, Debug)]
pub(super) struct BackwardItem {
    pub entry: Entry,
    pub head_kv: i64,
    pub stretch: i64,
    pub stretches: i64,
    pub chunk: i64,
    pub chunks: i64,
}

impl<'a> Schedule<'a> {
    /// Reads a schedule that [`build`] wrote for a layout of the same counts.
    ///
    /// # Safety
    /// `buffer` is readable and of the size `at` gives; nobody writes it during `'a`.
    pub(super) unsafe fn open(
        at: &ScheduleLayout,
        buffer: Buffer,
        problem: &Problem,
        shape: &Shape,
        sequences: &Sequences,
    ) -> Result<Self> {
        let base = buffer.data.cast::<u8>();
        // SAFETY: the header lies at the start of the buffer, which is aligned to 256 bytes.
        let header = unsafe { base.cast::<Header>().read() };
        let wrong = |reason: String| Err(Error::invalid("schedule", format!("{:?}", buffer.data), reason));
        let (batch, kv_batch) = (sequences.len() as i64, sequences.kv_len() as i64);
        if header.magic != MAGIC || header.batch != batch || header.kv_batch != kv_batch {
            return wrong(format!("not built by build_schedule for a layout of {batch} sequences"));
        }
        if header.built_for != fingerprint(problem, shape, sequences) {
            return wrong("built by build_schedule for another layout, or by another plan".to_owned());
        }
        // SAFETY: `build` wrote these parts, each at its place within the capacities.
        unsafe {
            let list = |at: usize, len: i64| std::slice::from_raw_parts(base.add(at).cast::<i64>(), len as usize);
            Ok(Schedule {
                entries: std::slice::from_raw_parts(base.add(at.entries).cast(), header.kv_batch as usize),
                forward_bounds: list(at.forward_bounds, header.forward_bundles + 1),
                backward_bounds: list(at.backward_bounds, header.backward_bundles + 1),
                q_turns: header.q_turns,
                kv_turns: header.kv_turns,
                cost: header.cost,
                members: problem.uses_kv_index.then(|| Members {
                    start: list(at.member_start, header.kv_batch + 1),
                    members: list(at.members, header.batch),
                    rows_before: list(at.rows_before, header.batch),
                }),
            })
        }
    }

    /// The forward item of a number.
    pub(super) fn forward_item(&self, item: i64) -> ForwardItem {
        let entry = self.entries[self.entries.partition_point(|e| e.forward_first <= item) - 1];
        let tile = lane_tile(entry.lanes, FORWARD_LANES);
        let tiles = lane_tiles(entry.lanes, FORWARD_LANES);
        let at = item - entry.forward_first;
        let first_lane = at % tiles * tile;
        ForwardItem { entry, head_kv: at / tiles, first_lane, lanes: tile.min(entry.lanes - first_lane) as usize }
    }

    /// The backward item of a number. Within a head, chunks vary fastest.
    pub(super) fn backward_item(&self, shape: &Shape, item: i64) -> BackwardItem {
        let entry = self.entries[self.entries.partition_point(|e| e.backward_first <= item) - 1];
        let chunks = shape.chunks(entry.keys, entry.lanes);
        let stretches = stretches(entry.lanes, entry.keys);
        let at = item - entry.backward_first;
        BackwardItem {
            entry,
            head_kv: at / (chunks * stretches),
            stretch: at / chunks % stretches,
            stretches,
            chunk: at % chunks,
            chunks,
        }
    }

    /// The sequence that lane `lane` of key/value sequence `kv` belongs to, as its place among those that attend to
    /// `kv`, and the lane's number within it.
    pub(super) fn find_lane(&self, kv: i64, lane: i64, group: i64) -> (usize, i64) {
        match self.members {
            None => (0, lane),
            Some(m) => {
                let range = m.start[kv as usize] as usize..m.start[kv as usize + 1] as usize;
                let before = &m.rows_before[range];
                let place = before.partition_point(|&rows| rows * group <= lane) - 1;
                (place, lane - before[place] * group)
            }
        }
    }

    /// The `place`-th sequence that attends to `kv`, if there are as many.
    pub(super) fn member(&self, kv: i64, place: usize) -> Option<usize> {
        match self.members {
            None => (place == 0).then_some(kv as usize),
            Some(m) => {
                let at = m.start[kv as usize] as usize + place;
                (at < m.start[kv as usize + 1] as usize).then(|| m.members[at] as usize)
            }
        }
    }
}

/// Visible pairs of a sequence, from five of its rows: only the order of work depends on it.
fn pairs(problem: &Problem, q_len: i64, kv_len: i64) -> i64 {
    if q_len == 0 || kv_len == 0 {
        return 0;
    }
    if problem.mask == Mask::Full {
        return q_len.saturating_mul(kv_len);
    }
    let seen = |i: i64| {
        let r = problem.mask.visible(i, q_len, kv_len);
        r.end - r.start
    };
    let sum: i64 = (0..5).map(|k| seen((q_len - 1) * k / 4)).sum();
    sum.saturating_mul(q_len) / 5
}

/// Writes the schedule of a batch.
///
/// # Safety
/// `buffer` is writable and of the size `at` gives; the layout's arrays are those `sequences` reads.
pub(super) unsafe fn build(
    problem: &Problem,
    shape: &Shape,
    at: &ScheduleLayout,
    sequences: &Sequences,
    buffer: Buffer,
) {
    let base = buffer.data.cast::<u8>();
    let (batch, kv_batch) = (sequences.len(), sequences.kv_len());
    // SAFETY: every part lies at its place in the buffer and holds as many entries as the capacities allow, which
    // validation compared with this layout. Plain integers have no invalid values, and `write_bytes` initialises them.
    let (entries, forward_bounds, backward_bounds, member_start, members, rows_before) = unsafe {
        let list = |at: usize, len: usize| {
            let data = base.add(at).cast::<i64>();
            data.write_bytes(0, len);
            std::slice::from_raw_parts_mut(data, len)
        };
        let entries = base.add(at.entries).cast::<Entry>();
        entries.write_bytes(0, kv_batch);
        let shared = |len| if problem.uses_kv_index { len } else { 0 };
        (
            std::slice::from_raw_parts_mut(entries, kv_batch),
            list(at.forward_bounds, BUNDLES + 2),
            list(at.backward_bounds, at.backward_bundles + 1),
            list(at.member_start, shared(kv_batch + 1)),
            list(at.members, shared(batch)),
            list(at.rows_before, shared(batch)),
        )
    };

    // Who attends to each key/value sequence: a counting sort by kv_index, in batch order. `member_start[kv + 1]` is
    // the running end of kv's range while it fills.
    if problem.uses_kv_index {
        for b in 0..batch {
            member_start[sequences.get(b).kv_sequence + 1] += 1;
        }
        let mut start = 0;
        for end in member_start.iter_mut().skip(1) {
            (start, *end) = (start + *end, start);
        }
        for b in 0..batch {
            let s = sequences.get(b);
            let end = &mut member_start[s.kv_sequence + 1];
            members[*end as usize] = b as i64;
            // Rows for now; made a prefix below.
            rows_before[*end as usize] = s.q_len;
            *end += 1;
        }
    }

    // Lanes and cost of every key/value sequence. They are worked out twice, to count and to place, rather than stored.
    let measure = |kv: usize| {
        let keys = sequences.kv(kv).len;
        let (rows, pairs) = if problem.uses_kv_index {
            let range = member_start[kv] as usize..member_start[kv + 1] as usize;
            members[range].iter().fold((0, 0i64), |(rows, sum), &b| {
                let m = sequences.get(b as usize).q_len;
                (rows + m, sum.saturating_add(pairs(problem, m, keys)))
            })
        } else {
            let m = sequences.get(kv).q_len;
            (m, pairs(problem, m, keys))
        };
        let lanes = rows * shape.group;
        // Rows cost too: they are loaded, transposed and stored.
        let cost = pairs.saturating_mul(shape.group).saturating_add(16 * (lanes + keys));
        Entry {
            kv: kv as i64,
            keys,
            lanes,
            cost,
            forward_first: 0,
            backward_first: 0,
            q_turn_first: 0,
            kv_turn_first: 0,
        }
    };

    // Longest first, to the half power of two.
    let bucket = |cost: i64| {
        let log = 63 - (cost | 1).leading_zeros();
        let half = if log == 0 { 0 } else { (cost >> (log - 1)) & 1 };
        127 - (2 * log as usize + half as usize)
    };
    let mut ends = [0usize; 129];
    for kv in 0..kv_batch {
        ends[bucket(measure(kv).cost) + 1] += 1;
    }
    for i in 1..ends.len() {
        ends[i] += ends[i - 1];
    }
    for kv in 0..kv_batch {
        let entry = measure(kv);
        let end = &mut ends[bucket(entry.cost)];
        entries[*end] = entry;
        *end += 1;
    }
    if problem.uses_kv_index {
        for kv in 0..kv_batch {
            let mut rows = 0;
            for before in &mut rows_before[member_start[kv] as usize..member_start[kv + 1] as usize] {
                (rows, *before) = (rows + *before, rows);
            }
        }
    }

    let heads = shape.heads_kv;
    let mut h = Header {
        magic: MAGIC,
        built_for: fingerprint(problem, shape, sequences),
        batch: batch as i64,
        kv_batch: kv_batch as i64,
        forward_items: 0,
        backward_items: 0,
        forward_bundles: 0,
        backward_bundles: 0,
        q_turns: 0,
        kv_turns: 0,
        cost: 0,
    };
    for e in entries.iter_mut() {
        e.forward_first = h.forward_items;
        e.backward_first = h.backward_items;
        e.q_turn_first = h.q_turns;
        e.kv_turn_first = h.kv_turns;
        let chunks = shape.chunks(e.keys, e.lanes);
        h.forward_items += heads * lane_tiles(e.lanes, FORWARD_LANES);
        h.backward_items += heads * chunks * stretches(e.lanes, e.keys);
        h.q_turns += heads * lane_tiles(e.lanes, BACKWARD_LANES);
        h.kv_turns += heads * chunks;
        h.cost = h.cost.saturating_add(e.cost.saturating_mul(heads));
    }
    let least = BUNDLE_WORK / (shape.dim + shape.dim_v) as i64 + 1;
    h.forward_bundles = bundle(entries, heads, h.cost, least, forward_bounds, |e| lane_tiles(e.lanes, FORWARD_LANES));
    h.backward_bundles = bundle(entries, heads, h.cost, least, backward_bounds, |e| {
        shape.chunks(e.keys, e.lanes) * stretches(e.lanes, e.keys)
    });
    // SAFETY: the header is at the start of the buffer.
    unsafe { base.cast::<Header>().write(h) };
}

/// Cuts the items into bundles of about equal cost, at most `bounds.len() - 1`; returns how many.
fn bundle(
    entries: &[Entry],
    heads: i64,
    cost: i64,
    least: i64,
    bounds: &mut [i64],
    items_of_head: impl Fn(&Entry) -> i64,
) -> i64 {
    let most = bounds.len() - 1;
    let target = (cost / (most as i64 - 1)).max(least);
    let (mut count, mut position, mut filled) = (0, 0, 0);
    for e in entries {
        let mut items = heads * items_of_head(e);
        if items == 0 {
            continue;
        }
        let each = (e.cost.saturating_mul(heads) / items).max(1);
        while items > 0 {
            let take = div_up(target - filled, each).clamp(1, items);
            items -= take;
            position += take;
            filled += take.saturating_mul(each);
            if filled >= target && count + 1 < most {
                count += 1;
                bounds[count] = position;
                filled = 0;
            }
        }
    }
    if bounds[count] < position {
        count += 1;
        bounds[count] = position;
    }
    count as i64
}

/// Divides a workspace into parts of whole cache lines.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Parts {
    end: usize,
}

impl Parts {
    /// The offset of the next `count` elements of `size` bytes; saturates.
    pub(super) fn take(&mut self, count: usize, size: usize) -> usize {
        let start = self.end;
        let bytes = count.saturating_mul(size).saturating_add(63) / 64 * 64;
        self.end = self.end.saturating_add(bytes);
        start
    }

    /// Bytes so far, rounded so that the next thread's part begins on a page of its own.
    pub(super) fn bytes(&self) -> usize {
        self.end.saturating_add(Requirements::ALIGNMENT - 1) / Requirements::ALIGNMENT * Requirements::ALIGNMENT
    }
}
