// Prints CuTe's own layouts of sparse fragments and of the Hopper metadata, shape:stride; needs no GPU.
// cute_layouts.txt is what it printed with the headers of nvidia-cutlass 4.2.0.0 and CUDA 13.0:
//   g++ -std=c++17 -I<cutlass>/include -I<cuda>/include -I<cuda>/include/cccl cute_layouts.cc && ./a.out
#include "cute/tensor.hpp"
#include "cute/atom/mma_traits_sm120_sparse.hpp"
#include "cute/atom/mma_traits_sm90_gmma_sparse.hpp"
#include "cutlass/gemm/collective/builders/sm90_sparse_config.inl"

using namespace cute;

template <class L>
void show(char const* name, L layout) {
  print(name), print(" "), print(layout), print("\n");
}

template <class T, int PerByte, int Tile>
void atom(char const* name) {
  using Config = cutlass::Sm90GemmSparseConfig<sparse_elem<2, T>, GMMA::Major::K, sparse_elem<PerByte, uint8_t>, Int<Tile>>;
  show(name, Config::fill_layoutE(make_shape(192, 8, 2 * Tile, 1)));
}

int main() {
  atom<half_t, 8, 32>("atom.f16.32");
  atom<half_t, 8, 64>("atom.f16.64");
  atom<half_t, 8, 96>("atom.f16.96");
  atom<bfloat16_t, 8, 128>("atom.bf16.128");
  atom<tfloat32_t, 4, 16>("atom.tf32.16");
  atom<tfloat32_t, 4, 128>("atom.tf32.128");
  atom<int8_t, 8, 64>("atom.s8.64");
  atom<uint8_t, 8, 128>("atom.u8.128");
  atom<float_e4m3_t, 8, 128>("atom.e4m3.128");
  atom<float_e5m2_t, 8, 64>("atom.e5m2.64");
  show("metadata.wgmma.8", SM90::GMMA::ELayout_64x64{});
  show("metadata.wgmma.16", SM90::GMMA::ELayout_64x32{});
  show("metadata.wgmma.32", SM90::GMMA::ELayout_64x16{});
  show("a.wgmma.8", GMMA::ALayout_64x32{});
  show("a.wgmma.16", GMMA::ALayout_64x16{});
  show("a.wgmma.32", GMMA::ALayout_64x8{});
  show("c.wgmma.16", GMMA::CLayout_64x16{});
  show("c.wgmma.256", GMMA::CLayout_64x256{});
  using Sm120 = MMA_Traits<SM120::SPARSE::SM120_SPARSE_16x8x64_TN<float_e4m3_t, float_e4m3_t, float>>;
  show("a.mma.8", Sm120::ALayout{});
  show("b.mma.8", Sm120::BLayout{});
  show("c.mma.8", Sm120::CLayout{});
  show("metadata.mma.8", Sm120::ELayout{});
}
