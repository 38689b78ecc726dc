// y = epilogue(x @ w^T) for few rows of x, in 16 bits: bound by reading w once, so w goes from memory straight into the
// registers that the tensor cores read. The host (decode.py) writes before this:
//
//   TOKENS   rows of x, in eights
//   WARPS    a block, which take turns along K and add up at the end; DEPTH: turns whose loads are in flight together
//   GATED, BIAS   0 or 1; ACT(v)   the activation; pack(lo, hi), to_float(bits)   to the 16-bit type and back
//   multiply(c, a0, a1, a2, a3, b0, b1)   mma of m16n8k16: here m are weight rows and n are rows of x
//
// A dot product may take its columns in any order, as long as both operands do. So each thread reads 8 adjacent columns
// (16 bytes) of its row of w and of its row of x, and feeds them to two products as if they were the columns that mma
// wants of it: thread t holds rows t/4 and t/4 + 8 of w, row t/4 of x, and from each 32 columns those from t%4*8.

constexpr int OUT = GATED ? 8 : 16;  // columns of y of a block; GATED: 8 rows of the gate's weight and 8 of up's meet in one thread

__device__ __forceinline__ uint4 stream(const u16* from) {  // read once: not kept in L1
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    KERNEL(const u16* x, const u16* w0, const u16* w1, u16* y, const u16* bias0, const u16* bias1, int M, int N, int K) {
  __shared__ float sums[WARPS][16][TOKENS * 8];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, columns = lane % 4 * 8;
  const int first = blockIdx.x * OUT, n = first + row;
  const uint4 nothing = make_uint4(0, 0, 0, 0);
  // Past N the last row is read, and not stored.
  const u16* lower = w0 + (long long)min(n, N - 1) * K + columns;
  const u16* upper = w1 + (long long)min(GATED ? n : n + 8, N - 1) * K + columns;

  float c[TOKENS][4] = {};
  for (int k0 = warp * 32; k0 < K; k0 += WARPS * 32 * DEPTH) {
    uint4 a[DEPTH], b[DEPTH], v[DEPTH][TOKENS];
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
      int k = k0 + d * WARPS * 32;
      bool inside = k + columns < K;  // K is a multiple of 8
      a[d] = inside ? stream(lower + k) : nothing;
      b[d] = inside ? stream(upper + k) : nothing;
#pragma unroll
      for (int t = 0; t < TOKENS; t++) {
        int m = t * 8 + row;
        v[d][t] = inside && m < M ? __ldg((const uint4*)(x + (long long)m * K + k + columns)) : nothing;
      }
    }
#pragma unroll
    for (int d = 0; d < DEPTH; d++)
#pragma unroll
      for (int t = 0; t < TOKENS; t++) {
        multiply(c[t], a[d].x, b[d].x, a[d].y, b[d].y, v[d][t].x, v[d][t].y);
        multiply(c[t], a[d].z, b[d].z, a[d].w, b[d].w, v[d][t].z, v[d][t].w);
      }
  }

#pragma unroll
  for (int t = 0; t < TOKENS; t++) {
    int m = t * 8 + lane % 4 * 2;
    sums[warp][row][m] = c[t][0], sums[warp][row][m + 1] = c[t][1];
    sums[warp][row + 8][m] = c[t][2], sums[warp][row + 8][m + 1] = c[t][3];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < OUT * TOKENS * 8; i += WARPS * 32) {
    int of = i % OUT, m = i / OUT, at = first + of;
    if (m >= M || at >= N) continue;
    float v = BIAS ? to_float(bias0[at]) : 0.f, up = GATED && BIAS ? to_float(bias1[at]) : 0.f;
#pragma unroll
    for (int s = 0; s < WARPS; s++) {
      v += sums[s][of][m];
      if (GATED) up += sums[s][(of + 8) % 16][m];
    }
    y[(long long)m * N + at] = (u16)pack(GATED ? ACT(v) * up : ACT(v), 0.f);
  }
}
