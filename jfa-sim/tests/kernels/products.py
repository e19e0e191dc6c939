"""Small Blackwell kernels with results that can be computed by hand: they test readings of descriptors and layouts."""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx


@triton.jit
def gemm(desc_a, desc_b, c, steps, ldc, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TRANS_B: tl.constexpr):
    """c = a b, one tile a CTA; b is [K, N], or [N, K] with TRANS_B."""
    a = tlx.local_alloc((M, K), tlx.dtype_of(desc_a), 2)
    b = tlx.local_alloc((N, K) if TRANS_B else (K, N), tlx.dtype_of(desc_b), 2)
    acc = tlx.local_alloc((M, N), tl.float32, 1, tlx.storage_kind.tmem)
    full = tlx.alloc_barriers(num_barriers=2, arrive_count=1)
    empty = tlx.alloc_barriers(num_barriers=2, arrive_count=1)
    done = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.barrier_wait(done[0], 0)
            rows = tl.program_id(0) * M + tl.arange(0, M)
            cols = tl.program_id(1) * N + tl.arange(0, N)
            tl.store(c + rows[:, None] * ldc + cols[None, :], tlx.local_load(acc[0]))
        with tlx.async_task(num_warps=1, num_regs=48):
            for i in range(steps):
                s = i % 2
                tlx.barrier_wait(empty[s], ((i // 2) & 1) ^ 1)
                tlx.barrier_expect_bytes(full[s], 2 * (M + N) * K)
                tlx.async_descriptor_load(desc_a, a[s], [tl.program_id(0) * M, i * K], full[s])
                if TRANS_B:
                    tlx.async_descriptor_load(desc_b, b[s], [tl.program_id(1) * N, i * K], full[s])
                else:
                    tlx.async_descriptor_load(desc_b, b[s], [i * K, tl.program_id(1) * N], full[s])
        with tlx.async_task(num_warps=1, num_regs=48):
            for i in range(steps):
                s = i % 2
                tlx.barrier_wait(full[s], (i // 2) & 1)
                if TRANS_B:
                    tlx.async_dot(a[s], tlx.local_trans(b[s]), acc[0], use_acc=i > 0, mBarriers=[empty[s]], out_dtype=tl.float32)
                else:
                    tlx.async_dot(a[s], b[s], acc[0], use_acc=i > 0, mBarriers=[empty[s]], out_dtype=tl.float32)
            tlx.tcgen05_commit(done[0])


@triton.jit
def attention(desc_q, desc_k, desc_v, o, scale, tiles, ldo, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    """One tile of queries against `tiles` tiles of keys, unnormalised online softmax: P goes through tensor memory."""
    q = tlx.local_alloc((M, D), tlx.dtype_of(desc_q), 1)
    k = tlx.local_alloc((N, D), tlx.dtype_of(desc_k), 1)
    v = tlx.local_alloc((N, D), tlx.dtype_of(desc_v), 1)
    s = tlx.local_alloc((M, N), tl.float32, 1, tlx.storage_kind.tmem)
    p = tlx.local_alloc((M, N), tlx.dtype_of(desc_v), 1, tlx.storage_kind.tmem)
    acc = tlx.local_alloc((M, D), tl.float32, 1, tlx.storage_kind.tmem)
    q_full = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    kv_full = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    s_full = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    p_full = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    o_full = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            m_i = tl.zeros([M], tl.float32) - float("inf")
            l_i = tl.zeros([M], tl.float32)
            for i in range(tiles):
                tlx.barrier_wait(s_full[0], i & 1)
                x = tlx.local_load(s[0]) * scale
                m_new = tl.maximum(m_i, tl.max(x, 1))
                x = tl.exp2(x - m_new[:, None])
                alpha = tl.exp2(m_i - m_new)
                l_i = l_i * alpha + tl.sum(x, 1)
                m_i = m_new
                if i > 0:
                    tlx.local_store(acc[0], tlx.local_load(acc[0]) * alpha[:, None])
                tlx.local_store(p[0], x.to(tlx.dtype_of(desc_v)))
                tlx.barrier_arrive(p_full[0], 1)
                tlx.barrier_wait(o_full[0], i & 1)
            rows = tl.program_id(0) * M + tl.arange(0, M)
            tl.store(o + rows[:, None] * ldo + tl.arange(0, D)[None, :], tlx.local_load(acc[0]) / l_i[:, None])
        with tlx.async_task(num_warps=1, num_regs=48):
            tlx.barrier_expect_bytes(q_full[0], 2 * M * D)
            tlx.async_descriptor_load(desc_q, q[0], [tl.program_id(0) * M, 0], q_full[0])
            for i in range(tiles):
                if i > 0:
                    tlx.barrier_wait(o_full[0], (i - 1) & 1)
                tlx.barrier_expect_bytes(kv_full[0], 4 * N * D)
                tlx.async_descriptor_load(desc_k, k[0], [i * N, 0], kv_full[0])
                tlx.async_descriptor_load(desc_v, v[0], [i * N, 0], kv_full[0])
        with tlx.async_task(num_warps=1, num_regs=48):
            tlx.barrier_wait(q_full[0], 0)
            for i in range(tiles):
                tlx.barrier_wait(kv_full[0], i & 1)
                tlx.async_dot(q[0], tlx.local_trans(k[0]), s[0], use_acc=False, mBarriers=[s_full[0]], out_dtype=tl.float32)
                tlx.barrier_wait(p_full[0], i & 1)
                tlx.async_dot(p[0], v[0], acc[0], use_acc=i > 0, mBarriers=[o_full[0]], out_dtype=tl.float32)


@triton.jit
def gemm_pair(desc_a, desc_b, c, steps, ldc, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """c = a b by pairs of CTAs: each holds half the rows of a tile and loads half the columns of b."""
    a = tlx.local_alloc((M // 2, K), tlx.dtype_of(desc_a), 1)
    b = tlx.local_alloc((K, N // 2), tlx.dtype_of(desc_b), 1)
    acc = tlx.local_alloc((M // 2, N), tl.float32, 1, tlx.storage_kind.tmem)
    full = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    both = tlx.alloc_barriers(num_barriers=1, arrive_count=2)
    free = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    rank = tlx.cluster_cta_rank()
    lead = rank % 2 == 0
    tlx.cluster_barrier()
    for i in range(steps):
        tlx.barrier_expect_bytes(full[0], 2 * (M // 2 + N // 2) * K)
        tlx.async_descriptor_load(desc_a, a[0], [tl.program_id(0) * (M // 2), i * K], full[0])
        tlx.async_descriptor_load(desc_b, b[0], [i * K, tl.program_id(1) * N + (rank % 2) * (N // 2)], full[0])
        tlx.barrier_wait(full[0], i & 1)
        tlx.barrier_arrive(both[0], 1, 0)
        tlx.barrier_wait(both[0], i & 1, pred=lead)
        tlx.async_dot(a[0], b[0], acc[0], use_acc=i > 0, mBarriers=[free[0]], two_ctas=True, out_dtype=tl.float32)
        tlx.barrier_wait(free[0], i & 1)
    rows = tl.program_id(0) * (M // 2) + tl.arange(0, M // 2)
    cols = tl.program_id(1) * N + tl.arange(0, N)
    tl.store(c + rows[:, None] * ldc + cols[None, :], tlx.local_load(acc[0]))
