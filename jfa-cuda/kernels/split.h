/* The split backward: what the host passes to its kernels and what they leave for each other. Plain C; the launcher mirrors
 * these structures and a test compares sizes and offsets.
 *
 * dq comes from one kernel (a unit is a unit of the forward, walked over keys), dk and dv from another (a unit is a tile of keys,
 * walked over the rows of every sequence that refers to it): nothing is added in device memory, so any head_dim, any number of
 * sequences for one key/value sequence and every order of work give the same bits.
 */
#ifndef JFA_KERNEL_SPLIT_H
#define JFA_KERNEL_SPLIT_H

#include "params.h"

/* Query rows of a block: one head's, or a 2^g-th of it for each of the 2^g heads packed into it, as in the forward. */
#define JFA_SPLIT_ROWS 64
/* -lse * log2(e) of a block's rows (-inf: the row has no part in anything), then their delta; in the order of row_place (split.cuh). */
#define JFA_SPLIT_STATISTICS_BYTES 512

/* One key/value sequence and those who refer to it. 16 bytes. */
typedef struct JfaKeySequence {
    int32_t kv_row;
    int32_t kv_len;
    int32_t begin, end;    /* its entries of `members`, in the order of the batch */
} JfaKeySequence;

/* A query sequence with rows. 16 bytes. */
typedef struct JfaMember {
    int32_t q_row;
    int32_t o_row;
    int32_t q_len;
    int32_t sequence;      /* its place in the batch */
} JfaMember;

/* The index of the key/value sequences, built once per batch behind the schedule. 256 bytes, then `keys`, `members`, `units`. */
typedef struct JfaIndexHeader {
    int32_t units;         /* tiles of keys, most work first */
    int32_t reserved[63];
} JfaIndexHeader;

/* Parameters of `jfa_backward_index` (by value). One CTA of 1,024 threads. */
typedef struct JfaIndexParams {
    const JfaScheduleHeader *schedule;
    const JfaSequence *sequences; /* [batch] */
    const void *kv_offsets;       /* [kv_batch + 1] */
    const int32_t *kv_lengths;    /* [kv_batch] or null */
    JfaIndexHeader *header;
    JfaKeySequence *keys;         /* [kv_batch] */
    JfaMember *members;           /* [batch], by key/value sequence, then in the order of the batch */
    JfaUnit *units;               /* [capacity] */
    int32_t *scratch;             /* [4 * batch + kv_batch] */
    int64_t total_kv;
    int32_t batch;
    int32_t kv_batch;
    int32_t kv_offsets_are_64bit;
    int32_t unit_keys;            /* keys of a unit */
    int32_t block_rows;           /* rows of a sequence in a block: JFA_SPLIT_ROWS >> packed_log2 */
    int32_t capacity;             /* total_kv / unit_keys + kv_batch */
} JfaIndexParams;

/* Parameters of `jfa_backward_dq_*`, `jfa_backward_dkdv_*` (by value, after the tensor maps of q, k, v, do) and
 * `jfa_backward_dq_sum_*`, launched in this order. The queries' maps have boxes of the block's rows and packed heads.
 *
 *   heads          packed heads: heads_q >> packed_log2
 *   blocks         rows of o / (JFA_SPLIT_ROWS >> packed_log2) + batch: block i of sequence b is number o_row / rows + b + i
 *   `statistics`   heads * blocks * JFA_SPLIT_STATISTICS_BYTES, aligned 128
 *   `control`      two counters, zero before: 128 bytes apart
 *   broadcast      dq of a pair of blocks is summed over every `slices`-th sequence by one CTA and kept in `partial`:
 *                  slices * heads * pairs * 128 rows * kernel's head_dim * 4 bytes, aligned 128; null otherwise
 */
typedef struct JfaSplitParams {
    const JfaScheduleHeader *header;
    const JfaSequence *sequences;
    const JfaUnit *query_units;   /* the forward list */
    const JfaIndexHeader *index;
    const JfaKeySequence *keys;
    const JfaMember *members;
    const JfaUnit *key_units;
    const float *lse;             /* [heads_q, lse_head_stride] */
    const void *o;
    void *dq;
    void *dk;
    void *dv;
    int32_t *control;
    float *statistics;
    float *partial;
    int64_t lse_head_stride;      /* elements */
    int64_t o_row_bytes, o_head_bytes;
    int64_t dq_row_bytes, dq_head_bytes;
    int64_t dk_row_bytes, dk_head_bytes;
    int64_t dv_row_bytes, dv_head_bytes;
    float scale;
    float scale_log2;             /* scale * log2(e) */
    int32_t heads;
    int32_t heads_kv;
    int32_t packed_log2;
    int32_t blocks;
    int32_t batch;                /* sequences of this call */
    int32_t broadcast;            /* rows of the one query of all sequences; 0: jagged queries */
    int32_t pairs;                /* broadcast: pairs of blocks */
    int32_t slices;               /* broadcast: parts of the batch */
    int32_t vectors_qk;           /* 16-byte pieces of a row of dq and dk */
    int32_t vectors_v;            /* and of o and dv */
    JfaMask mask;
    int32_t q_rows;               /* rows of dq in this call */
    int32_t o_rows;               /* rows of o and lse */
    int32_t kv_rows;              /* rows of dk and dv */
} JfaSplitParams;

#endif
