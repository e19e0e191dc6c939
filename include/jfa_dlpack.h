// SPDX-License-Identifier: MIT OR Apache-2.0
/**
 * jfa_dlpack.h - views of tensors that come as DLPack (https://dmlc.github.io/dlpack), without copying.
 *
 * DLPack's structs are an ABI of their own. This header declares them under names of its own, so that it works without
 * dlpack.h and beside any version of it, included before or after; a DLTensor of dlpack.h is passed with
 * JFA_DL_TENSOR(tensor). It needs nothing of the library but jfa.h.
 */
#ifndef JFA_DLPACK_H
#define JFA_DLPACK_H

#include <stdio.h>

#include "jfa.h"

#ifdef __cplusplus
extern "C" {
#endif

/** DLDevice. */
typedef struct jfa_dl_device {
    int32_t device_type;
    int32_t device_id;
} jfa_dl_device;

/** DLDataType. */
typedef struct jfa_dl_data_type {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
} jfa_dl_data_type;

/** DLTensor. */
typedef struct jfa_dl_tensor {
    void *data;
    jfa_dl_device device;
    int32_t ndim;
    jfa_dl_data_type dtype;
    int64_t *shape;
    int64_t *strides;
    uint64_t byte_offset;
} jfa_dl_tensor;

JFA_STATIC_ASSERT(sizeof(jfa_dl_tensor) == 48, "DLTensor");
JFA_STATIC_ASSERT(offsetof(jfa_dl_tensor, device) == 8, "DLTensor.device");
JFA_STATIC_ASSERT(offsetof(jfa_dl_tensor, ndim) == 16, "DLTensor.ndim");
JFA_STATIC_ASSERT(offsetof(jfa_dl_tensor, dtype) == 20, "DLTensor.dtype");
JFA_STATIC_ASSERT(offsetof(jfa_dl_tensor, shape) == 24, "DLTensor.shape");
JFA_STATIC_ASSERT(offsetof(jfa_dl_tensor, strides) == 32, "DLTensor.strides");
JFA_STATIC_ASSERT(offsetof(jfa_dl_tensor, byte_offset) == 40, "DLTensor.byte_offset");

/** A `const DLTensor *` as this header calls it. */
#define JFA_DL_TENSOR(tensor) ((const jfa_dl_tensor *)(const void *)(tensor))

/* Codes of DLPack that mean something here. */
enum {
    JFA_DL_CPU = 1,
    JFA_DL_CUDA = 2,
    JFA_DL_CUDA_HOST = 3,
    JFA_DL_CUDA_MANAGED = 13,
    JFA_DL_FLOAT = 2,
    JFA_DL_BFLOAT = 4
};

/* Where the data lives, and its address. Returns 0 for a device that JFA does not know. */
static inline int jfa_dl_place_(const jfa_dl_tensor *tensor, int32_t *memory_space, void **data) {
    switch (tensor->device.device_type) {
    case JFA_DL_CPU:
    case JFA_DL_CUDA_HOST:
        *memory_space = JFA_MEMORY_HOST;
        break;
    case JFA_DL_CUDA:
    case JFA_DL_CUDA_MANAGED:
        *memory_space = JFA_MEMORY_CUDA;
        break;
    default:
        return 0;
    }
    *data = tensor->data ? (void *)((char *)tensor->data + tensor->byte_offset) : NULL;
    return 1;
}

/* Writes a reason, cut where the buffer ends. */
#define JFA_DL_FAIL_(...)                                                                                              \
    do {                                                                                                               \
        if (error && error_size) {                                                                                     \
            (void)snprintf(error, error_size, __VA_ARGS__);                                                            \
        }                                                                                                              \
    } while (0)

/**
 * The view of a three-dimensional DLPack tensor `[rows, heads, dim]` of f32, f16 or bf16. The innermost stride must be 1
 * (anything where dim is 1 or the tensor is empty); the others are free. The view borrows: the DLPack tensor must stay
 * alive, and on a CUDA device its producer's stream must have been waited for, as DLPack asks.
 *
 * *memory_space becomes JFA_MEMORY_HOST or JFA_MEMORY_CUDA. On failure *view is untouched and error, a buffer of
 * error_size bytes (or NULL), gets a text that names the field and its value.
 */
static inline JFA_MUST_USE jfa_status jfa_tensor_from_dlpack(const jfa_dl_tensor *tensor, jfa_tensor *view,
                                                             int32_t *memory_space, char *error, size_t error_size) {
    jfa_tensor out = {sizeof(jfa_tensor), NULL, 0, 0, 0, 0, 0, 0, 0};
    int32_t space = 0;
    int empty = 0;
    if (!tensor || !view || !memory_space) {
        JFA_DL_FAIL_("%s is NULL", !tensor ? "tensor" : !view ? "view" : "memory_space");
        return JFA_ERROR_NULL_POINTER;
    }
    if (!jfa_dl_place_(tensor, &space, &out.data)) {
        JFA_DL_FAIL_("device_type = %d: must be CPU, CUDA, CUDA host or CUDA managed memory",
                     (int)tensor->device.device_type);
        return JFA_ERROR_UNSUPPORTED;
    }
    if (tensor->dtype.lanes == 1 && tensor->dtype.code == JFA_DL_FLOAT && tensor->dtype.bits == 32) {
        out.dtype = JFA_DTYPE_F32;
    } else if (tensor->dtype.lanes == 1 && tensor->dtype.code == JFA_DL_FLOAT && tensor->dtype.bits == 16) {
        out.dtype = JFA_DTYPE_F16;
    } else if (tensor->dtype.lanes == 1 && tensor->dtype.code == JFA_DL_BFLOAT && tensor->dtype.bits == 16) {
        out.dtype = JFA_DTYPE_BF16;
    } else {
        JFA_DL_FAIL_("dtype = {code %d, bits %d, lanes %d}: must be f32, f16 or bf16", (int)tensor->dtype.code,
                     (int)tensor->dtype.bits, (int)tensor->dtype.lanes);
        return JFA_ERROR_UNSUPPORTED;
    }
    if (tensor->ndim != 3) {
        JFA_DL_FAIL_("ndim = %d: must be 3, [rows, heads, dim]", (int)tensor->ndim);
        return JFA_ERROR_INVALID_ARGUMENT;
    }
    if (!tensor->shape) {
        JFA_DL_FAIL_("shape is NULL");
        return JFA_ERROR_NULL_POINTER;
    }
    for (int i = 0; i < 3; i++) {
        if (tensor->shape[i] < 0) {
            JFA_DL_FAIL_("shape[%d] = %lld: must not be negative", i, (long long)tensor->shape[i]);
            return JFA_ERROR_INVALID_ARGUMENT;
        }
        empty |= tensor->shape[i] == 0;
    }
    out.rows = tensor->shape[0];
    out.heads = tensor->shape[1];
    out.dim = tensor->shape[2];
    if (tensor->strides) {
        if (tensor->strides[2] != 1 && out.dim > 1 && !empty) {
            JFA_DL_FAIL_("strides[2] = %lld: the innermost stride must be 1", (long long)tensor->strides[2]);
            return JFA_ERROR_INVALID_ARGUMENT;
        }
        out.row_stride = tensor->strides[0];
        out.head_stride = tensor->strides[1];
    } else {
        /* The largest number, which no tensor has, where the elements of a row cannot be counted. */
        out.row_stride = out.dim && out.heads > INT64_MAX / out.dim ? INT64_MAX : out.heads * out.dim;
        out.head_stride = out.dim;
    }
    *view = out;
    *memory_space = space;
    return JFA_OK;
}

/**
 * The view of a two-dimensional f32 DLPack tensor `[heads, rows]` as a log-sum-exp. The inner stride must be 1. Errors
 * and ownership as in jfa_tensor_from_dlpack.
 */
static inline JFA_MUST_USE jfa_status jfa_lse_from_dlpack(const jfa_dl_tensor *tensor, jfa_lse *view,
                                                          int32_t *memory_space, char *error, size_t error_size) {
    jfa_lse out = {sizeof(jfa_lse), NULL, 0, 0};
    void *data = NULL;
    int32_t space = 0;
    if (!tensor || !view || !memory_space) {
        JFA_DL_FAIL_("%s is NULL", !tensor ? "tensor" : !view ? "view" : "memory_space");
        return JFA_ERROR_NULL_POINTER;
    }
    if (!jfa_dl_place_(tensor, &space, &data)) {
        JFA_DL_FAIL_("device_type = %d: must be CPU, CUDA, CUDA host or CUDA managed memory",
                     (int)tensor->device.device_type);
        return JFA_ERROR_UNSUPPORTED;
    }
    if (tensor->dtype.lanes != 1 || tensor->dtype.code != JFA_DL_FLOAT || tensor->dtype.bits != 32) {
        JFA_DL_FAIL_("dtype = {code %d, bits %d, lanes %d}: must be f32", (int)tensor->dtype.code,
                     (int)tensor->dtype.bits, (int)tensor->dtype.lanes);
        return JFA_ERROR_UNSUPPORTED;
    }
    if (tensor->ndim != 2) {
        JFA_DL_FAIL_("ndim = %d: must be 2, [heads, rows]", (int)tensor->ndim);
        return JFA_ERROR_INVALID_ARGUMENT;
    }
    if (!tensor->shape) {
        JFA_DL_FAIL_("shape is NULL");
        return JFA_ERROR_NULL_POINTER;
    }
    for (int i = 0; i < 2; i++) {
        if (tensor->shape[i] < 0) {
            JFA_DL_FAIL_("shape[%d] = %lld: must not be negative", i, (long long)tensor->shape[i]);
            return JFA_ERROR_INVALID_ARGUMENT;
        }
    }
    out.data = (float *)data;
    out.rows = tensor->shape[1];
    out.head_stride = out.rows;
    if (tensor->strides) {
        if (tensor->strides[1] != 1 && out.rows > 1 && tensor->shape[0] > 0) {
            JFA_DL_FAIL_("strides[1] = %lld: the innermost stride must be 1", (long long)tensor->strides[1]);
            return JFA_ERROR_INVALID_ARGUMENT;
        }
        out.head_stride = tensor->strides[0];
    }
    *view = out;
    *memory_space = space;
    return JFA_OK;
}

#undef JFA_DL_FAIL_

#ifdef __cplusplus
}
#endif

#endif /* JFA_DLPACK_H */
