// What the Hopper kernels share: the copy engine (TMA), the barriers that its copies arrive at, and wgmma's operands.

struct alignas(64) TensorMap { u64 opaque[16]; };

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
__device__ __forceinline__ void barrier_expect(u32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Neither arrive nor wait orders ordinary memory: what they guard is written by TMA and read by wgmma. Release and
// acquire at cluster scope would cost a memory barrier each.
__device__ __forceinline__ void barrier_arrive_at(u32 barrier, u32 block) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier), "r"(block) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(
          barrier), "r"(parity) : "memory");
}
__device__ __forceinline__ void copy_in(u32 to, const TensorMap* map, u32 barrier, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          to), "l"(map), "r"(barrier), "r"(column), "r"(row) : "memory");
}
__device__ __forceinline__ void copy_in(u32 to, const u16* from, int bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(barrier) : "memory");
}

__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// A matrix in shared memory for wgmma: rows of 128 bytes, swizzled, 8 of them 1024 bytes from the next 8. Where rows are
// of m or n and not of k, 64 columns are `block` bytes from the next 64. COLUMNS_16, ROWS_16: 16 further along k.
constexpr int COLUMNS_16 = 32 >> 4, ROWS_16 = 2048 >> 4;
__device__ __forceinline__ u64 matrix_at(u32 address, int block) {
  return (u64)((address & 0x3FFFF) >> 4) | (u64)(block >> 4) << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}
