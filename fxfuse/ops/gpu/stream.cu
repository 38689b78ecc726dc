// y = epilogue(x @ w^T) for few rows of x on Hopper, in 16 bits: bound by reading w once, so one thread keeps as many
// copies of w in flight as shared memory holds, and the tensor cores take its rows as the long side of the product.
// The host (stream.py) writes before this:
//
//   TOKENS   rows of x, in eights; GROUPS: warpgroups, 64 weight rows each; BK: columns of a stage, 64; STAGES in flight
//   SPLIT    blocks of a cluster, which share the columns of one tile and add up what they found
//   TRANSPOSED   1: w lies in memory as [K, N]
//   GATED, BIAS   0 or 1; ACT(v)   the activation; pack(lo, hi), to_float(bits)   to the 16-bit type and back
//   multiply(d, a, b, accumulate)   wgmma of m64 x TOKENS x k16: here m are weight rows and n are rows of x

constexpr int ROWS = 64 * GROUPS, HALF = ROWS / 2, OUT = GATED ? HALF : ROWS;  // of a tile; GATED: HALF of gate's and of up's
constexpr int BOX = TRANSPOSED ? 64 : HALF;  // weight rows that one copy brings
constexpr int BOX_BYTES = BOX * BK * 2, W_BYTES = ROWS * BK * 2, STAGE_BYTES = W_BYTES + TOKENS * BK * 2;
static_assert(!GATED || HALF % BOX == 0, "a copy brings rows of one weight");
constexpr int BARRIERS_AT = STAGES * STAGE_BYTES;
constexpr int THREADS = 128 * GROUPS + 32;
constexpr int SUMS = ROWS + 4;  // floats of a row of x; 4 more keep a warp's stores in different banks
static_assert(TOKENS * SUMS * 4 <= BARRIERS_AT, "sums take the place of the stages");

__device__ __forceinline__ float shared_at(const float* mine, int rank) {  // the same place in another block
  float v;
  asm volatile("{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %1, %2;\nld.shared::cluster.f32 %0, [remote];\n}"
               : "=f"(v) : "r"(shared_address(mine)), "r"(rank));
  return v;
}

__device__ __forceinline__ float sum_of_blocks(const float* mine) {
  float v = 0.f;
#pragma unroll
  for (int rank = 0; rank < SPLIT; rank++) v += SPLIT == 1 ? *mine : shared_at(mine, rank);
  return v;
}

extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(THREADS)
    KERNEL(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w0, const __grid_constant__ TensorMap w1,
           u16* y, const u16* bias0, const u16* bias1, int M, int N, int K) {
  extern __shared__ unsigned char raw[];
  const u32 memory = (shared_address(raw) + 1023) & ~1023u, full = memory + BARRIERS_AT, empty = full + 8 * STAGES;
  float* const sums = (float*)(raw + (memory - shared_address(raw)));  // where the stages were
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) barrier_init(full + 8 * s, 1), barrier_init(empty + 8 * s, GROUPS);
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  __syncthreads();

  const int rank = blockIdx.x % SPLIT, first = blockIdx.x / SPLIT * OUT, group = threadIdx.x / 128;
  const int steps = (K + BK - 1) / BK, share = (steps + SPLIT - 1) / SPLIT;
  const int begin = rank * share, end = min(begin + share, steps);
  int stage = 0, parity = 0;
  if (group == GROUPS) {  // the producer
    if (threadIdx.x % 32 == 0) {
      for (int k = begin; k < end; k++) {
        u32 at = memory + stage * STAGE_BYTES, arrived = full + 8 * stage;
        barrier_wait(empty + 8 * stage, parity ^ 1);
        barrier_expect(arrived, STAGE_BYTES);
#pragma unroll
        for (int row = 0; row < ROWS; row += BOX) {
          bool up = GATED && row >= HALF;
          int n = first + row - (up ? HALF : 0);
          copy_in(at + row / BOX * BOX_BYTES, up ? &w1 : &w0, arrived, TRANSPOSED ? n : k * BK, TRANSPOSED ? k * BK : n);
        }
        copy_in(at + W_BYTES, &x, arrived, k * BK, 0);
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
    }
    __syncwarp();
  } else {
    float d[TOKENS / 2] = {};
    int before = -1;
    for (int k = begin; k < end; k++) {
      u32 at = memory + stage * STAGE_BYTES;
      u64 a = matrix_at(at + group * 64 * BK * 2, 0), b = matrix_at(at + W_BYTES, 0);
      barrier_wait(full + 8 * stage, parity);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int kk = 0; kk < BK / 16; kk++) multiply(d, a + (TRANSPOSED ? ROWS_16 : COLUMNS_16) * kk, b + COLUMNS_16 * kk, 1);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      if (before >= 0) {
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (threadIdx.x % 128 == 0) barrier_arrive(empty + 8 * before);
      }
      before = stage;
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    asm volatile("bar.sync 1, %0;" ::"n"(128 * GROUPS) : "memory");  // nobody reads the stages any more
    int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, m = threadIdx.x % 4 * 2;
#pragma unroll
    for (int t = 0; t < TOKENS / 8; t++) {
      float* at = sums + (t * 8 + m) * SUMS + row;
      at[0] = d[t * 4], at[SUMS] = d[t * 4 + 1], at[8] = d[t * 4 + 2], at[SUMS + 8] = d[t * 4 + 3];
    }
  }
  if (SPLIT == 1) __syncthreads();
  else sync_cluster();
  for (int i = rank * THREADS + threadIdx.x; i < OUT * M; i += SPLIT * THREADS) {
    int of = i % OUT, m = i / OUT, n = first + of;
    if (n >= N) continue;
    float v = sum_of_blocks(sums + m * SUMS + of) + (BIAS ? to_float(bias0[n]) : 0.f), r = ACT(v);
    if (GATED) r *= sum_of_blocks(sums + m * SUMS + of + HALF) + (BIAS ? to_float(bias1[n]) : 0.f);
    y[(long long)m * N + n] = (u16)pack(r, 0.f);
  }
  if (SPLIT > 1) sync_cluster();  // nobody may leave while others still read here
}
