// The activations of fxfuse.ops.activations, by the special-function unit: each instruction of an epilogue shows.
__device__ __forceinline__ float exp2_(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ float log2_(float x) { float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ float reciprocal(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ float exp_(float x) { return exp2_(x * 1.4426950408889634f); }
__device__ __forceinline__ float identity(float x) { return x; }
__device__ __forceinline__ float relu(float x) { return x < 0.f ? 0.f : x; }
__device__ __forceinline__ float relu2(float x) { x = relu(x); return x * x; }
__device__ __forceinline__ float leaky_relu(float x, float slope) { return x > 0.f ? x : slope * x; }
__device__ __forceinline__ float sigmoid(float x) { return reciprocal(1.f + exp2_(-1.4426950408889634f * x)); }
__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }
__device__ __forceinline__ float quick_gelu(float x, float scale) { return x * sigmoid(scale * x); }
__device__ __forceinline__ float tanh_(float x) { float y; asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ float gelu_tanh(float x) {
  float s = x * x;  // x * sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3)), in base 2
  return x * reciprocal(1.f + exp2_(x * (-0.10294324f * s - 2.3022082f)));
}
__device__ __forceinline__ float gelu(float x) {  // x * sigmoid(logit(cdf(x))), in base 2
#if TEN_BITS  // of float16
  float s = x * x, q = ((-3.2100718e-6f * s + 8.7904330e-5f) * s + 3.6207723e-4f) * s - 0.10523003f;
  return x * reciprocal(1.f + exp2_(x * (q * s - 2.3020440f)));
#else  // fitted up to 6, where the cdf is 1
  float s = fminf(x * x, 36.f);
  return x * reciprocal(1.f + exp2_(x * ((1.0157009e-3f * s - 0.10678461f) * s - 2.3011115f)));
#endif
}
__device__ __forceinline__ float elu(float x, float alpha) {
  return x > 0.f ? x : alpha * (x > -0.01f ? x * (1.f + x * (0.5f + x / 6.f)) : exp_(x) - 1.f);
}
__device__ __forceinline__ float to_six(float x) { x = x < 0.f ? 0.f : x; return (x > 6.f ? 6.f : x); }
__device__ __forceinline__ float hardswish(float x) { return x * to_six(x + 3.f) * 0.16666666666666666f; }
__device__ __forceinline__ float hardsigmoid(float x) { return to_six(x + 3.f) * 0.16666666666666666f; }
__device__ __forceinline__ float softplus(float x, float beta, float threshold) {
  float e = exp_(beta * x);
  float soft = (e < 1e-4f ? e * (1.f - 0.5f * e) : log2_(1.f + e) * 0.6931471805599453f) / beta;
  return beta * x > threshold ? x : soft;
}
__device__ __forceinline__ float mish(float x) {
  float e = exp_(x > 20.f ? 20.f : x), n = e * (e + 2.f);
  return x * (n * reciprocal(n + 2.f));
}
