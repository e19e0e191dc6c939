# SPDX-License-Identifier: MIT OR Apache-2.0
"""jfa_dlpack.h on DLPack tensors that NumPy makes: python dlpack_numpy.py shim.so"""

import ctypes as c
import sys

import numpy as np


class Tensor(c.Structure):
    _fields_ = [("struct_size", c.c_size_t), ("data", c.c_void_p), ("dtype", c.c_int32), ("reserved", c.c_int32)] + [
        (name, c.c_int64) for name in ("rows", "heads", "dim", "row_stride", "head_stride")
    ]


class Lse(c.Structure):
    _fields_ = [("struct_size", c.c_size_t), ("data", c.c_void_p), ("rows", c.c_int64), ("head_stride", c.c_int64)]


shim = c.CDLL(sys.argv[1])
pointer_of = c.pythonapi.PyCapsule_GetPointer
pointer_of.restype = c.c_void_p
pointer_of.argtypes = [c.py_object, c.c_char_p]


def convert(function, view, array):
    capsule = array.__dlpack__()
    space, text = c.c_int32(), c.create_string_buffer(200)
    tensor = c.c_void_p(pointer_of(capsule, b"dltensor"))  # a DLManagedTensor starts with its DLTensor
    status = function(tensor, c.byref(view), c.byref(space), text, c.c_size_t(len(text)))
    assert status != 0 or space.value == 1
    return status, text.value.decode()


fused = np.arange(7 * 3 * 2 * 4, dtype=np.float32).reshape(7, 3, 2, 4)
for array, dtype in ((fused[:, 1], 1), (fused.astype(np.float16)[2:, 2], 2), (np.zeros((0, 2, 4), np.float32), 1)):
    view = Tensor()
    assert convert(shim.shim_tensor, view, array) == (0, "")
    size = array.itemsize
    assert (view.struct_size, view.dtype, view.reserved) == (c.sizeof(Tensor), dtype, 0)
    assert (view.rows, view.heads, view.dim) == array.shape
    if array.size:
        assert view.data == array.ctypes.data
        assert (view.row_stride * size, view.head_stride * size) == array.strides[:2]
lse = Lse()
assert convert(shim.shim_lse, lse, fused.reshape(-1, 8)[:, :5]) == (0, "")
assert (lse.data, lse.rows, lse.head_stride) == (fused.ctypes.data, 5, 8)
status, text = convert(shim.shim_tensor, Tensor(), fused[:, 0].transpose(0, 2, 1))
assert status == 7001 and text == "strides[2] = 4: the innermost stride must be 1", text
status, text = convert(shim.shim_tensor, Tensor(), np.zeros((2, 2, 2)))
assert status == 7101 and text.startswith("dtype = {code 2, bits 64, lanes 1}"), text
print("ok")
