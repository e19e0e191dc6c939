/* SPDX-License-Identifier: MIT OR Apache-2.0
 * The inline functions of jfa_dlpack.h as symbols, for dlpack_numpy.py. */
#include "jfa_dlpack.h"

int32_t shim_tensor(const void *tensor, jfa_tensor *view, int32_t *space, char *error, size_t size);
int32_t shim_lse(const void *tensor, jfa_lse *view, int32_t *space, char *error, size_t size);

int32_t shim_tensor(const void *tensor, jfa_tensor *view, int32_t *space, char *error, size_t size) {
    return jfa_tensor_from_dlpack(JFA_DL_TENSOR(tensor), view, space, error, size);
}

int32_t shim_lse(const void *tensor, jfa_lse *view, int32_t *space, char *error, size_t size) {
    return jfa_lse_from_dlpack(JFA_DL_TENSOR(tensor), view, space, error, size);
}
