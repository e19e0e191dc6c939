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

/* One sequence, offsets resolved and clamped into the buffers. 32 bytes. */
typedef struct JfaSequence {
    int32_t q_row;  /* first row in q (0 with a broadcast query) */
    int32_t o_row;  /* first row in o, lse, do */
    int32_t q_len;
    int32_t kv_row; /* first row in k, v */
    int32_t kv_len;
    int32_t kv_sequence; /* index of the key/value sequence */
    int32_t reserved[2];
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
    int32_t reserved;
} JfaScheduleParams;

/* Parameters of `jfa_forward_*` (by value, after the tensor maps of q, k, v, o). */
typedef struct JfaForwardParams {
    const JfaScheduleHeader *header;
    const JfaSequence *sequences;
    const JfaUnit *units;
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

#endif
