// y = epilogue(x @ w^T) on Hopper, in 16 bits: one producer warp copies tiles by TMA, two warpgroups multiply and take
// turns, so that one's epilogue runs while the tensor cores work for the other. The host (hopper.py) writes before this:
//
//   WN       weight rows of a tile, a multiple of 64 up to 192; GATED: WN/2 of the gate's weight and WN/2 of up's
//   BM, BK   rows of x, and columns, of a tile; CLUSTER: blocks along M that share each weight tile, 2
//   STAGES   tiles in flight; SLAB: columns of y that leave together
//   SLAB_SETS   1 or 2: with 2 the halves of a tile do not wait for each other to leave shared memory
//   GROUP    tile rows that are walked before the next tile column, so that they meet in the L2 cache
//   TRANSPOSED   1: w lies in memory as [K, N], and WN is 128
//   GATED, BIAS   0 or 1; ACT(v)   the activation; pack(lo, hi), to_float(bits)   to the 16-bit type and back
//   multiply(d, a, b, accumulate)   wgmma of m64 x WN x k16
//
// Layouts. Tiles in shared memory are rows of 64 elements (128 bytes) in TMA's 128-byte swizzle, which wgmma reads: rows
// of columns of x and w, or for TRANSPOSED two blocks of rows of 64 weight rows. The
// accumulator of a 64-row half: thread t of a warpgroup holds rows 16*(t/32) + (t%32)/4 and that + 8, and of each 8
// columns the two from 2*(t%4).

constexpr int OUT = GATED ? WN / 2 : WN;            // columns of y in a tile
constexpr int HALF = WN / 2;                        // weight rows that one copy brings
constexpr int A_BYTES = BM * BK * 2, HALF_BYTES = HALF * BK * 2, STAGE_BYTES = A_BYTES + 2 * HALF_BYTES;
constexpr int SLABS = OUT / SLAB;                   // y leaves in slabs of 64 rows x SLAB columns
constexpr int SLAB_BYTES = 64 * SLAB * 2, C_BYTES = SLABS * SLAB_BYTES;
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;

// shared memory: stages; for each consumer its slabs and the biases of its tile; barriers
constexpr int C_AT = STAGES * STAGE_BYTES, BIAS_AT = C_AT + 2 * SLAB_SETS * C_BYTES, BARRIERS_AT = BIAS_AT + 2 * WN * 2;

__device__ __forceinline__ void copy_in_for_both(u32 to, const TensorMap* map, u32 barrier, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to), "l"(map), "r"(barrier), "r"(column), "r"(row), "h"((u16)3) : "memory");
}
__device__ __forceinline__ void copy_out(const TensorMap* map, u32 from, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from),
               "r"(column), "r"(row) : "memory");
}
__device__ __forceinline__ void sync_warpgroup(int which) {
  if (which == 0) asm volatile("bar.sync 1, 128;" ::: "memory");
  else asm volatile("bar.sync 2, 128;" ::: "memory");
}

struct Tiles {
  int rows, columns, count;
  __device__ Tiles(int M, int N)
      : rows((M + BM * CLUSTER - 1) / (BM * CLUSTER)), columns((N + OUT - 1) / OUT), count(rows * columns) {}
  __device__ void locate(int tile, int rank, int& row, int& column) const {
    int group = tile / (GROUP * columns), first = group * GROUP, height = min(rows - first, GROUP);
    int within = tile % (GROUP * columns);
    row = (first + within % height) * CLUSTER + rank;
    column = within / height;
  }
};

// Both halves of a tile begin as the bias of their columns, which the producer sent ahead. So the epilogue keeps
// its registers, and all this happens while the other warpgroup multiplies.
__device__ __forceinline__ void begin_with_bias(float (&d0)[WN / 2], float (&d1)[WN / 2], u32 biases, int lane) {
#pragma unroll
  for (int j = 0; j < WN / 8; j++) {
    u32 two;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(two) : "r"(biases + j * 16 + lane % 4 * 4) : "memory");
    float lo = to_float((u16)two), hi = to_float((u16)(two >> 16));
    d0[j * 4] = d0[j * 4 + 2] = d1[j * 4] = d1[j * 4 + 2] = lo;
    d0[j * 4 + 1] = d0[j * 4 + 3] = d1[j * 4 + 1] = d1[j * 4 + 3] = hi;
  }
#pragma unroll
  for (int i = 0; i < WN / 2; i++) asm volatile("" : "+f"(d0[i]), "+f"(d1[i]));  // now, not after the wait that follows
}

// One 64-row half of a tile: activation and product, then through shared memory to y.
__device__ __forceinline__ void epilogue(const float (&d)[WN / 2], u32 slabs, const TensorMap* y, int row, int column, int which,
                                         int tid) {
  int warp = tid / 32, lane = tid % 32;
  if (tid == 0) asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(SLAB_SETS - 1) : "memory");  // these slabs have left
  sync_warpgroup(which);
#pragma unroll
  for (int j = 0; j < OUT / 8; j += 2) {
    u32 words[4];
#pragma unroll
    for (int q = 0; q < 2; q++) {
      const float* v = d + (j + q) * 4;
      float r[4] = {ACT(v[0]), ACT(v[1]), ACT(v[2]), ACT(v[3])};
      if (GATED) {
        const float* u = v + WN / 4;
        r[0] *= u[0], r[1] *= u[1], r[2] *= u[2], r[3] *= u[3];
      }
      words[q * 2] = pack(r[0], r[1]), words[q * 2 + 1] = pack(r[2], r[3]);
    }
    // Four 8 x 8 blocks: rows lane%16 of this warp's 16, columns 8*(lane/16) on; 16-byte chunks in the 64-byte swizzle.
    int at_row = warp * 16 + lane % 16, at_column = j * 8 + lane / 16 * 8;
    u32 chunk = (at_column % SLAB / 8) ^ (at_row / 2 % 4);
    u32 address = slabs + at_column / SLAB * SLAB_BYTES + at_row * SLAB * 2 + chunk * 16;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]), "r"(words[1]),
                 "r"(words[2]), "r"(words[3]) : "memory");
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  sync_warpgroup(which);
  if (tid == 0) {
    for (int s = 0; s < SLABS; s++) copy_out(y, slabs + s * SLAB_BYTES, column + s * SLAB, row);
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(384, 1)
    KERNEL(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w0, const __grid_constant__ TensorMap w1,
           const __grid_constant__ TensorMap y, const u16* bias0, const u16* bias1, int M, int N, int K) {
  extern __shared__ unsigned char raw[];
  u32 memory = (shared_address(raw) + 1023) & ~1023u;
  u32 full = memory + BARRIERS_AT, empty = full + 8 * STAGES, turn = empty + 8 * STAGES, biases = turn + 16;
  u32 rank;
  asm volatile("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) barrier_init(full + 8 * s, 1), barrier_init(empty + 8 * s, CLUSTER);
    for (int c = 0; c < 2; c++) barrier_init(turn + 8 * c, 1), barrier_init(biases + 8 * c, 1);
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  sync_cluster();

  const Tiles tiles(M, N);
  const int steps = (K + BK - 1) / BK, cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;
  const int group = threadIdx.x / 128, tid = threadIdx.x % 128;

  if (group == 0) {  // the producer
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
    if (tid == 0) {
      int stage = 0, parity = 0, whose = 0;
      for (int tile = cluster; tile < tiles.count; tile += clusters) {
        int row, column;
        tiles.locate(tile, rank, row, column);
        int first = column * OUT, second = GATED ? first : first + HALF;  // weight rows
        // Stages hold back this copy until the biases of two tiles ago are read, as long as two tiles have more steps
        // than there are stages. N is a multiple of 8; what lies past it is not stored.
        if (BIAS) {
          u32 bias_at = memory + BIAS_AT + whose * WN * 2, arrived = biases + 8 * whose;
          int bytes = min(OUT, N - first) * 2;
          barrier_wait(empty + 8 * stage, parity ^ 1);
          barrier_expect(arrived, GATED ? 2 * bytes : bytes);
          copy_in(bias_at, bias0 + first, bytes, arrived);
          if (GATED) copy_in(bias_at + HALF * 2, bias1 + first, bytes, arrived);
          whose ^= 1;
        }
        for (int k = 0; k < steps; k++) {
          u32 at = memory + stage * STAGE_BYTES, arrived = full + 8 * stage;
          barrier_wait(empty + 8 * stage, parity ^ 1);
          barrier_expect(arrived, STAGE_BYTES);
          copy_in(at, &x, arrived, k * BK, row * BM);
          // Each block brings one half of the weight tile, for both.
          int n = rank ? second : first, outer = TRANSPOSED ? k * BK : n, inner = TRANSPOSED ? n : k * BK;
          copy_in_for_both(at + A_BYTES + rank * HALF_BYTES, rank ? &w1 : &w0, arrived, inner, outer);
          if (++stage == STAGES) stage = 0, parity ^= 1;
        }
      }
    }
    __syncwarp();  // before the cluster's barrier, at which warps arrive whole
  } else {  // the consumers: every second tile each
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    const int me = group - 1;
    const u32 slabs = memory + C_AT + me * SLAB_SETS * C_BYTES;
    float d0[WN / 2], d1[WN / 2];
    int turns = 0, step = me * steps;  // `step` counts over the tiles of both
    for (int tile = cluster + me * clusters; tile < tiles.count; tile += 2 * clusters, step += steps) {
      int row, column, before = -1, stage = step % STAGES, parity = step / STAGES % 2;
      tiles.locate(tile, rank, row, column);
      if (BIAS) {
        barrier_wait(biases + 8 * me, turns);
        begin_with_bias(d0, d1, memory + BIAS_AT + me * WN * 2, tid % 32);
      }
      barrier_wait(turn + 8 * me, me == 0 ? turns ^ 1 : turns);
      turns ^= 1;
      for (int k = 0; k < steps; k++, step++) {
        barrier_wait(full + 8 * stage, parity);
        u64 a = matrix_at(memory + stage * STAGE_BYTES, 0), b = matrix_at(memory + stage * STAGE_BYTES + A_BYTES, HALF_BYTES);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int kk = 0; kk < BK / 16; kk++) {  // 64 rows of x are 8192 bytes
          multiply(d0, a + COLUMNS_16 * kk, b + (TRANSPOSED ? ROWS_16 : COLUMNS_16) * kk, BIAS || (k | kk) != 0);
          multiply(d1, a + 512 + COLUMNS_16 * kk, b + (TRANSPOSED ? ROWS_16 : COLUMNS_16) * kk, BIAS || (k | kk) != 0);
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        if (before >= 0) {
          asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
          if (tid < CLUSTER) barrier_arrive_at(empty + 8 * before, tid);
        }
        before = stage;
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
      if (tid == 0) barrier_arrive(turn + 8 * (me ^ 1));
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      if (tid < CLUSTER) barrier_arrive_at(empty + 8 * before, tid);
      epilogue(d0, slabs, &y, row * BM, column * OUT, me, tid);
      epilogue(d1, slabs + (SLAB_SETS - 1) * C_BYTES, &y, row * BM + 64, column * OUT, me, tid);
    }
    if (tid == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
  sync_cluster();  // nobody may leave while the other block may still write here
}
