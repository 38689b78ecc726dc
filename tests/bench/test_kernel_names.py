import pytest

from fxfuse.bench.kernel_names import Described, describe, short

NAMES = [
    ("fxfuse_gated_linear_gelu_tanh_bf16_128x192x64", Described("fused gemm", "128x192x64", "", "bfloat16")),
    ("fxfuse_linear_f16_8x128x64", Described("fused gemm", "8x128x64", "", "float16")),
    ("fxfuse_linear", Described("fused gemm")),
    ("fxfuse_copy", Described("copy")),
    (
        "nvjet_tst_192x192_64x4_1x2_h_bz_coopA_bias_TNT",
        Described("gemm", "192x192_64x4", "tn", "bfloat16"),
    ),
    ("nvjet_hsh_64x8_64x16_4x1_v_bz_NNT", Described("gemm", "64x8_64x16", "nn", "float16")),
    ("nvjet_sm100_tst_128x256_64x6_2x1_2cta_v_bz_TNN", Described("gemm", "128x256_64x6", "tn", "bfloat16")),
    (
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel",
        Described("gemm", "128x128x64", "tn", "bfloat16"),
    ),
    (
        "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_aligna4_alignc4_execute",
        Described("gemm", "64x64x8", "nn", "float32"),
    ),
    ("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x3_tn", Described("gemm", "128x64", "tn", "bfloat16")),
    ("ampere_sgemm_128x64_nn", Described("gemm", "128x64", "nn", "float32")),
    (
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_f16_s161616gemm_f16_32x32_128x2_tn_align8>(Params)",
        Described("gemm", "32x32_128x2", "tn", "float16"),
    ),
    ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(...)", Described("reduce")),
    (
        "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&, "
        "at::native::GeluType)::{lambda()#1}, std::array<char*, 2ul> >(int)",
        Described("elementwise"),
    ),
    (
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIterator&)>(int)",
        Described("copy"),
    ),
    (
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float>(int)",
        Described("reduce"),
    ),
    ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float> >(...)", Described("reduce")),
    (
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<OpaqueType<2u>, unsigned int, 4>(...)",
        Described("copy"),
    ),
    ("void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*)", Described("gather")),
    ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4> >(...)", Described("attention")),
    ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(...)", Described("attention")),
    ("triton_poi_fused_gelu_mul_0", Described("elementwise")),
    ("triton_red_fused_mean_pow_1", Described("reduce")),
    ("triton_tem_fused_addmm_2", Described("gemm")),
    ("_geglu_tanh_forward_kernel", Described("elementwise")),
    ("somebody_elses_kernel", Described("other")),
]


@pytest.mark.parametrize(("name", "says"), NAMES, ids=[name[:40] for name, _ in NAMES])
def test_what_a_name_says(name, says):
    assert describe(name) == says


@pytest.mark.parametrize(
    ("name", "bare"),
    [
        ("nvjet_tst_192x192_64x4_1x2_h_bz_coopA_bias_TNT", "nvjet_tst_192x192_64x4_1x2_h_bz_coopA_bias_TNT"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(at::Iterator&)>(int)",
            "vectorized_elementwise_kernel<Gelu>",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<8, at::native::BinaryFunctor<c10::BFloat16, c10::BFloat16, "
            "c10::BFloat16, at::native::binary_internal::MulFunctor<float> > >(int)",
            "vectorized_elementwise_kernel<Mul>",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16> >(int)",
            "vectorized_elementwise_kernel<add>",
        ),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>(...)", "splitKreduce_kernel"),
    ],
)
def test_short_names_keep_what_is_computed(name, bare):
    assert short(name) == bare
