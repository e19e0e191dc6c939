/* What the host passes to the kernels and what the schedule kernel leaves for them. Plain C; the launcher mirrors these
 * structures and a test compares sizes and offsets.
 *
 * Rows, lengths and tile counts are 32-bit: capacities are limited to JFA_MAX_ROWS rows (the host refuses more). Strides and
 * byte offsets are 64-bit.
 */
#ifndef JFA_KERNEL_PARAMS_H
#define JFA_KERNEL_PARAMS_H

#include <stdint.h>

#define JFA_MAX_ROWS 2147481600 /* 2^31 - 2048: a row plus a tile never overflows */

/* Tensor maps with a movable row bound. Five dimensions: (column, bound, end, head, wrap) of sizes (head_dim, JFA_BOUND, rows + 1,
 * heads, JFA_BOUND + 1) and strides (S, S, head_stride, 2^39 - S) bytes, S being the row stride, base the tensor's address. The
 * box (64, box_rows, 1, box_heads, 1) at coordinates (column, JFA_BOUND - n, e, head, JFA_BOUND) is the n rows that end before
 * row e: rows past them exceed the bound and arrive as zeros (a store drops them). Its address is
 *     base + (JFA_BOUND - n) S + e S + JFA_BOUND (2^39 - S) = base + (e - n) S + 2^64,
 * so that the wrap takes the bound away again without a base below the tensor: the copy engine reads the map's base address
 * for elements out of bounds, and an address below a tensor need not be mapped (an H200 then reports an illegal address). */
#define JFA_BOUND 33554432 /* 2^25 */

/* One sequence, offsets resolved and clamped into the buffers. 32 bytes. */
typedef struct JfaSequence {
    int32_t q_row;  /* first row in q (0 with a broadcast query) */
    int32_t o_row;  /* first row in o, lse, do */
    int32_t q_len;
    int32_t kv_row; /* first row in k, v */
    int32_t kv_len;
    int32_t kv_sequence; /* index of the key/value sequence */
    int32_t reserved[2]; /* the schedule kernel's own */
} JfaSequence;

/* One unit of work: a slice of one sequence. 8 bytes. Forward: query rows first .. first + rows_per_unit. */
typedef struct JfaUnit {
    int32_t sequence;
    int32_t first;
} JfaUnit;

/* The schedule buffer: this header, then `sequences`, then the unit lists, at the byte offsets given by the host
 * (JfaScheduleParams). 256 bytes. Written by the schedule kernel, read by every pass. */
typedef struct JfaScheduleHeader {
    int32_t forward_units;  /* entries of the forward list, longest work first */
    int32_t backward_units; /* entries of the backward list */
    int32_t reserved[62];
} JfaScheduleHeader;

/* Visibility of key j for row i: i + d - left <= j <= i + d + right; -1: unbounded. Full: both -1. Causal: right 0. */
typedef struct JfaMask {
    int32_t left;
    int32_t right;
    int32_t bottom_right; /* 1: d = kv_len - q_len; 0: d = 0 */
} JfaMask;

/* Parameters of `jfa_schedule` (by value). */
typedef struct JfaScheduleParams {
    const void *q_offsets;       /* [batch + 1]; null with a broadcast query */
    const void *kv_offsets;      /* [kv_batch + 1] */
    const int32_t *q_lengths;    /* [batch] or null */
    const int32_t *kv_lengths;   /* [kv_batch] or null */
    const int32_t *kv_index;     /* [batch] or null */
    JfaScheduleHeader *header;   /* schedule buffer */
    JfaSequence *sequences;      /* [batch] */
    JfaUnit *forward_list;       /* [forward_capacity] */
    JfaUnit *backward_list;      /* [backward_capacity] */
    int64_t total_q;             /* rows of q (capacity); with a broadcast query: batch * q_len rows of o */
    int64_t total_kv;            /* rows of k and v (capacity) */
    int32_t batch;
    int32_t kv_batch;
    int32_t q_offsets_are_64bit;
    int32_t kv_offsets_are_64bit;
    int32_t broadcast_q_len;     /* -1: jagged query */
    int32_t forward_rows;        /* query rows of a forward unit */
    int32_t forward_kv_tile;     /* keys of a forward tile */
    int32_t forward_capacity;
    int32_t backward_rows;       /* key rows of a backward unit */
    int32_t backward_q_tile;     /* query rows of a backward tile */
    int32_t backward_capacity;
    int32_t merge_shared_kv;     /* 1: neighbours with the same kv_index and adjoining rows become one sequence (full mask only) */
    JfaMask mask;
    int32_t backward_share;      /* CTAs of the backward per key/value head, rounded up */
} JfaScheduleParams;

/* Items of a launch, in scratch memory that may hold anything at first: whoever comes first with a new key sets the number up, and
 * the last draw of a launch takes the key away, so that the same launch can be repeated from a captured graph. A stale word of
 * memory is mistaken for a key with probability 2^-63. 16 bytes. */
typedef struct JfaQueue {
    uint64_t key;
    uint32_t next;
    uint32_t reserved;
} JfaQueue;

/* Parameters of `jfa_forward_*` (by value, after the tensor maps of q, k, v, o). */
typedef struct JfaForwardParams {
    const JfaScheduleHeader *header;
    const JfaSequence *sequences;
    const JfaUnit *units;
    JfaQueue *queue;             /* in the launch's own workspace: CTAs draw items from it (schedule.cuh) */
    uint64_t queue_key;          /* odd, and of no other launch whose work may be unfinished */
    float *lse;                  /* [heads_q, lse_head_stride] */
    int64_t lse_head_stride;
    float scale_log2;            /* scale * log2(e); log2(e) when prescale is set */
    float prescale;              /* the scale itself where it is not positive (applied to every score), else 1 */
    int32_t heads;               /* heads a unit is repeated for: heads_q, or heads_kv when a group is packed into the rows */
    int32_t group;               /* query heads per key/value head */
    int32_t packed_log2;         /* log2 of the query heads packed into the rows of a block; 0: none */
    int32_t has_prescale;
    JfaMask mask;
    int32_t o_rows;              /* rows of o and lse in this call; rows past it are not written */
} JfaForwardParams;

/* Parameters of `jfa_backward_*` and `jfa_backward_broadcast_*` (by value, after the tensor maps of q, k, v, o, do, dk, dv; the last
 * two with boxes of 16 rows). A unit is all tiles of JFA_BACKWARD_KEYS keys of one sequence (JfaUnit.first = -1) or those of one
 * pass, repeated for every group of `cluster` key/value heads. A pass is one tile; in `jfa_backward_*`, whose CTAs work in clusters of
 * two, also two neighbouring tiles, one in each CTA.
 *
 * dq of a block of query rows is summed over passes in their order in `partial`: the first one stores its share, later ones add
 * theirs, the last one takes the sum along and stores dq in its own type. Of a pair, each CTA sums one half of the columns of its own.
 * Where one CTA needs what another one has added, it waits for flags in `control`. With a broadcast query every CTA keeps a sum of its
 * own in `partial` instead, and `jfa_backward_reduce_*` (same parameter, heads_q * blocks * 8 CTAs of 256 threads) adds them in the
 * order of the CTAs. Behind the sums of a block stand its values of delta, once for each CTA of a pair.
 *
 *   cluster          2; 1 with a broadcast query
 *   q_tile           64 rows at head_dim 128, 128 rows at head_dim 64
 *   row blocks       blocks = total_q / q_tile + batch per query head (a block is q_tile rows of one sequence);
 *                    broadcast: ceil(q_len / q_tile) per slice and query head, slices = ceil(grid / heads_kv)
 *   `partial`        heads_q * blocks * JFA_BACKWARD_BLOCK_BYTES (broadcast: times slices), aligned 128; not touched, hence may be
 *                    null, where no sequence has more than cluster * JFA_BACKWARD_KEYS keys and the query is not broadcast
 *   `control`        128 + 8 * heads_q * blocks bytes, aligned 128, zero before every launch
 *   units            backward_capacity = total_kv / (cluster * JFA_BACKWARD_KEYS) + batch
 *   grid             a multiple of cluster
 */
#define JFA_BACKWARD_KEYS 128
#define JFA_BACKWARD_BLOCK_BYTES 33792

typedef struct JfaBackwardParams {
    const JfaScheduleHeader *header;
    const JfaSequence *sequences;
    const JfaUnit *units;
    const float *lse;            /* [heads_q, lse_head_stride] */
    int32_t *control;
    float *partial;
    void *dq;                    /* written straight from registers */
    void *dk;                    /* here where rows without any product become zero; else through the tensor map */
    void *dv;                    /* likewise, and from column 64 on */
    int64_t lse_head_stride;     /* elements */
    int64_t dq_row_bytes, dq_head_bytes;
    int64_t dk_row_bytes, dk_head_bytes;
    int64_t dv_row_bytes, dv_head_bytes;
    float scale;
    float scale_log2;            /* scale * log2(e), but at least 2^-60 of either sign: lse is divided by it */
    int32_t heads_kv;
    int32_t group;               /* query heads per key/value head */
    int32_t blocks;              /* row blocks per query head (per slice and head with a broadcast query) */
    int32_t broadcast;           /* rows of the one query of all sequences; 0: jagged queries */
    int32_t vectors_qk;          /* 16-byte pieces of a row of dq and dk */
    int32_t vectors_v;           /* and of dv */
    JfaMask mask;
    int32_t o_rows;              /* rows of o, lse, do (and dq) in this call */
    int32_t kv_rows;             /* rows of k, v, dk, dv in this call */
    int32_t ctas;                /* grid of `jfa_backward_*` */
} JfaBackwardParams;

/* Parameters of `jfa_backward_prepare_*` (by value), which goes before `jfa_backward_unordered_*`. For every row of every row block:
 * -lse * log2(e) or what makes p 0 (-inf: rows that see no key, rows past the sequence), and -delta = -rowsum(o * do). Rows of dq that no
 * tile sees become zero.
 *
 *   row blocks       blocks = total_q / q_tile + batch per query head
 *   `partial`        heads_q * blocks * JFA_UNORDERED_BLOCK_BYTES, aligned 128
 *   `control`        of `jfa_backward_unordered_*`: 144 + 24 * heads_q * blocks bytes, aligned 128, zero before every launch
 *   units            tiles, always (backward_share 0x7FFFFFFF): backward_capacity = total_kv / JFA_BACKWARD_KEYS + batch
 *   grid             any number of CTAs of 256 threads
 */
#define JFA_UNORDERED_BLOCK_BYTES(q_tile, head_dim) (((q_tile) * ((head_dim) + 2) * 4 + 127) / 128 * 128)

typedef struct JfaPrepareParams {
    const JfaScheduleHeader *header;
    const JfaSequence *sequences;
    const JfaUnit *units;
    const float *lse;            /* [heads_q, lse_head_stride] */
    const void *o;
    const void *d_o;
    float *partial;
    void *dq;
    int64_t lse_head_stride;     /* elements */
    int64_t o_row_bytes, o_head_bytes;
    int64_t do_row_bytes, do_head_bytes;
    int64_t dq_row_bytes, dq_head_bytes;
    int32_t heads;               /* query heads */
    int32_t blocks;              /* row blocks per query head */
    int32_t vectors_qk;          /* 16-byte pieces of a row of dq */
    int32_t vectors_v;           /* and of o and do */
    JfaMask mask;
    int32_t o_rows;              /* rows of o, lse, do (and dq) in this call */
} JfaPrepareParams;

#endif
