/* What the host passes to the kernels of support.cu. Plain C; the launcher mirrors these structures and a test compares
 * sizes and offsets. */
#ifndef JFA_KERNEL_SUPPORT_H
#define JFA_KERNEL_SUPPORT_H

#include <stdint.h>

/* The arrays of a layout, in the order in which `jfa_validate` looks at them. */
enum JfaArray {
    JFA_ARRAY_NONE = 0,
    JFA_ARRAY_Q_OFFSETS = 1,
    JFA_ARRAY_KV_OFFSETS = 2,
    JFA_ARRAY_Q_LENGTHS = 3,
    JFA_ARRAY_KV_LENGTHS = 4,
    JFA_ARRAY_KV_INDEX = 5,
};

/* What `jfa_validate` found: the first bad entry. 32 bytes. */
typedef struct JfaFinding {
    int32_t array;   /* JfaArray; JFA_ARRAY_NONE: everything is in order */
    int32_t reserved;
    int64_t index;   /* entry */
    int64_t value;   /* its value */
    int64_t limit;   /* offsets: the entry before (0 at the first), or the rows of the buffer where the last one ends past them;
                        lengths: rows of the slot; kv_index: kv_batch */
} JfaFinding;

/* Parameters of `jfa_validate` (by value). */
typedef struct JfaValidateParams {
    const void *q_offsets;     /* [batch + 1]; null with a broadcast query */
    const void *kv_offsets;    /* [kv_batch + 1] */
    const int32_t *q_lengths;  /* [batch] or null */
    const int32_t *kv_lengths; /* [kv_batch] or null */
    const int32_t *kv_index;   /* [batch] or null */
    JfaFinding *finding;
    int64_t total_q;           /* rows of q */
    int64_t total_kv;          /* rows of k and v */
    int64_t batch;
    int64_t kv_batch;
    int32_t q_offsets_are_64bit;
    int32_t kv_offsets_are_64bit;
} JfaValidateParams;

/* A `[rows, heads, dim]` tensor whose unused rows become zero. */
typedef struct JfaZeroTensor {
    void *data;           /* null: none */
    int64_t row_bytes;    /* distance of rows */
    int64_t head_bytes;   /* distance of heads */
    int32_t heads;
    int32_t vectors;      /* 16-byte pieces of a head's row */
} JfaZeroTensor;

/* Parameters of `jfa_zero_rows` (by value). */
typedef struct JfaZeroParams {
    const void *offsets;       /* [sequences + 1]; null: sequences of fixed_length rows, one after another */
    const int32_t *lengths;    /* [sequences] or null */
    int64_t sequences;
    int64_t rows;              /* rows of the tensors */
    int64_t fixed_length;
    JfaZeroTensor tensors[2];
    float *lse;                /* [lse_heads, lse_head_stride], unused rows become -inf; null: none */
    int64_t lse_head_stride;
    int32_t lse_heads;
    int32_t offsets_are_64bit;
} JfaZeroParams;

#endif
