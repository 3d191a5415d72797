// The compiled extension: kernel tables and calls. Tensors come in through the border (operand.h); no libtorch in here.
#include <string>

#include "binding.h"
#include "isa.h"
#include "operand.h"
#include "runtime/digest.h"
#include "scratch.h"
#include "team.h"

#ifdef __GLIBC__
#include <malloc.h>
#endif

NB_MODULE(_ext, m) {
  using namespace twofour;
  read_tensors();
  m.def("cpu_has", [](const std::string& name) { return cpu_has(name.c_str()); });
  m.def("instruction_sets", [] {
    nanobind::list sets;
    for (const InstructionSet& set : kInstructionSets)
      sets.append(nanobind::make_tuple(set.name, set.level, set.parents, set.measured));
    return sets;
  });
  m.def("threads_backend", [] { return std::string(threads_backend()); });
  m.def("use_threads", [](const std::string& source, const std::string& library) {
    return use_threads(source.c_str(), library.c_str());
  });
  // Of bytes, uint8 (count,): what a file of programs says of its own (runtime/digest.h).
  m.def("digest", [](const Operand& bytes, uint64_t seed) {
    const View view = Border("digest").dense(bytes, "bytes", {Type::u8});
    return digest(view.data, static_cast<uint64_t>(view.count()), seed);
  });
  // Addresses, since oneDNN's opaque tensors are none that DLPack describes; nothing is read or written there, and the
  // system refuses what is not mapped.
  m.def("advise_huge_pages",
        [](uintptr_t address, size_t bytes) { advise_huge_pages(reinterpret_cast<void*>(address), bytes); });
  m.def("collapse_huge_pages",
        [](uintptr_t address, size_t bytes) { advise_huge_pages(reinterpret_cast<void*>(address), bytes, true); });
  m.def("release_free_memory", [] {
    const size_t freed = Scratch::release_all();
#ifdef __GLIBC__
    malloc_trim(0);
#endif
    return freed;
  });
  bind_nm_mask(m);
  bind_nm_stripes(m);
  bind_column_sums(m);
  bind_nm_compress(m);
  bind_nm_unbiased(m);
  bind_nm_sddmm(m);
  bind_nm_gradient(m);
  bind_nm_conv_gradient(m);
  bind_nm_matmul(m);
  bind_hybrid_matmul(m);
  bind_block_matmul(m);
  bind_bits_matmul(m);
  bind_bits_conv(m);
  bind_dense_matmul(m);
  bind_nm_conv(m);
  bind_depthwise_conv(m);
  bind_squeeze_excite(m);
  bind_dense_conv(m);
  bind_conv_chain(m);
  bind_window_conv(m);
  bind_fused_matmul(m);
  bind_recurrent(m);
  bind_activation(m);
  bind_attention(m);
  bind_attention_gradient(m);
  bind_ragged(m);
  bind_norm(m);
  bind_rotation(m);
  bind_fused_block(m);
  bind_copy(m);
  bind_executor(m);
  bind_held(m);
  bind_mapped(m);
}
