// The C functions of include/twofour.h: nothing that is thrown leaves them.
#include <twofour.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <mutex>
#include <new>
#include <string>

#include "calls.h"
#include "model.h"
#include "native/binding.h"

struct twofour_model {
  twofour::Model model;
};

namespace twofour {

void add_calls() {
  static std::once_flag once;
  std::call_once(once, [] {
    nb::module_ nobody;
    for (const auto bind : {bind_nm_matmul, bind_hybrid_matmul, bind_block_matmul, bind_bits_matmul, bind_bits_conv, bind_dense_matmul, bind_nm_conv,
                            bind_depthwise_conv, bind_squeeze_excite, bind_column_sums, bind_dense_conv, bind_conv_chain, bind_window_conv,
                            bind_fused_matmul, bind_recurrent, bind_attention, bind_activation, bind_rotation, bind_ragged, bind_norm, bind_fused_block,
                            bind_copy})
      bind(nobody);
  });
}

namespace {

constexpr int kMostThreads = 1024;
constexpr size_t kMostTensors = 1 << 10;
constexpr size_t kMostOptions = 4096;  // bytes

// What a caller passes that means nothing.
struct BadArgument : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct BadFile : std::runtime_error {
  using std::runtime_error::runtime_error;
};

std::string text_of(const Refusal& refusal) {
  std::string text = refusal.what;
  if (!refusal.got.empty()) text += "; got " + refusal.got;
  if (!refusal.wanted.empty()) text += "; wanted " + refusal.wanted;
  if (!refusal.remedy.empty()) text += "; " + refusal.remedy;
  return text;
}

twofour_status answer(twofour_status status, const std::string& text, char* error, size_t error_size) noexcept {
  if (error && error_size > 0) std::snprintf(error, error_size, "%s", text.c_str());
  return status;
}

// Runs `body`; says what it throws. `refused`: what a refusal by the border means here.
template <class Body>
twofour_status guarded(const char* what, twofour_status refused, char* error, size_t error_size, const Body& body) noexcept {
  const auto failed = [&](twofour_status status, const std::string& text) {
    return answer(status, std::string(what) + ": " + text, error, error_size);
  };
  try {
    try {
      body();
      return answer(TWOFOUR_OK, "", error, error_size);
    } catch (const BadArgument& thrown) {
      return failed(TWOFOUR_ARGUMENT, thrown.what());
    } catch (const BadFile& thrown) {
      return failed(TWOFOUR_FILE, thrown.what());
    } catch (const OtherVersion& thrown) {
      return failed(TWOFOUR_VERSION, thrown.what());
    } catch (const Malformed& thrown) {
      return failed(TWOFOUR_DAMAGED, std::string(thrown.what()) + "; write the file again with twofour.export.to_runtime");
    } catch (const Unfit& thrown) {
      return failed(TWOFOUR_INPUT, thrown.what());
    } catch (const Refusal& refusal) {
      return failed(refused, text_of(refusal));
    } catch (const std::bad_alloc&) {
      return answer(TWOFOUR_MEMORY, "the system grants no memory", error, error_size);
    } catch (const std::exception& thrown) {
      return failed(TWOFOUR_REFUSED, thrown.what());
    }
  } catch (...) {  // no memory for a text
    if (error && error_size > 0) *error = '\0';
    return TWOFOUR_MEMORY;
  }
}

void require(bool fits, const char* what) {
  if (!fits) throw BadArgument(what);
}

twofour_options read_options(const twofour_options* given) {
  twofour_options options{};
  if (given) {
    require(given->size >= sizeof options.size, "options without their size: set options.size to sizeof(twofour_options)");
    require(given->size <= kMostOptions, "options of an impossible size: set options.size to sizeof(twofour_options)");
    const auto* const bytes = reinterpret_cast<const unsigned char*>(given);
    for (size_t i = sizeof options; i < given->size; i++)
      require(bytes[i] == 0, "options that this library does not know: they are of a newer one");
    std::memcpy(&options, given, std::min(given->size, sizeof options));
  }
  require(options.threads >= 0 && options.threads <= kMostThreads, "options.threads is not from 0 to 1024");
  if (options.threads == 0) options.threads = 1;
  return options;
}

twofour_model* make(AlignedMemory memory, uint64_t size, const twofour_options& options) {
  add_calls();
  return new twofour_model{Model(ProgramFile(std::move(memory), size), options.threads, {options.parallel, options.pool})};
}

AlignedMemory read_file(const char* path, uint64_t* size) {
  const auto failed = [&](const char* what) { throw BadFile(std::string(path) + " " + what + ": " + std::strerror(errno)); };
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path, "rb"), std::fclose);
  if (!file) failed("cannot be opened");
  errno = 0;
  std::setvbuf(file.get(), nullptr, _IONBF, 0);
  if (std::fgetc(file.get()) == EOF && errno == EISDIR) throw BadFile(std::string(path) + " is a folder");
  if (std::fseek(file.get(), 0, SEEK_END) != 0) failed("cannot be read");
  const long end = std::ftell(file.get());
  if (end < 0 || std::fseek(file.get(), 0, SEEK_SET) != 0) failed("cannot be read");
  *size = static_cast<uint64_t>(end);
  AlignedMemory memory = aligned_memory(*size);
  if (std::fread(memory.get(), 1, *size, file.get()) != *size) failed("cannot be read to its end");
  return memory;
}

template <class Make>
twofour_status load(const char* what, twofour_model** model, char* error, size_t error_size, const Make& made) {
  if (model) *model = nullptr;
  return guarded(what, TWOFOUR_UNSUPPORTED, error, error_size, [&] {
    require(model != nullptr, "`model`, where the result goes, is NULL");
    *model = made();
  });
}

const Program* program_of(const twofour_model* model, int32_t program) {
  if (!model || program < 0 || static_cast<size_t>(program) >= model->model.programs().size()) return nullptr;
  return &model->model.programs()[static_cast<size_t>(program)];
}

twofour_status describe(const std::vector<NamedTensor>& all, int32_t index, twofour_description* description) {
  if (!description || index < 0 || static_cast<size_t>(index) >= all.size()) return TWOFOUR_ARGUMENT;
  const NamedTensor& one = all[static_cast<size_t>(index)];
  *description = {one.name.c_str(), static_cast<int32_t>(one.type), static_cast<int32_t>(one.shape.size()), one.shape.data(),
                  static_cast<uint64_t>(one.bytes)};
  return TWOFOUR_OK;
}

std::vector<GivenTensor> read_tensors(const twofour_tensor* given, size_t count, bool output) {
  require(count <= kMostTensors, "more than 1024 inputs or outputs");
  require(given || count == 0, output ? "`outputs` is NULL" : "`inputs` is NULL");
  std::vector<GivenTensor> found;
  for (size_t i = 0; i < count; i++) {
    const twofour_tensor& one = given[i];
    require(one.name != nullptr, "a tensor whose name is NULL");
    require(one.axes >= 0 && (one.shape || one.axes == 0), "a tensor whose shape is NULL");
    for (size_t k = 0; k < i; k++) require(std::strcmp(given[k].name, one.name) != 0, "two tensors of one name");
    static constexpr int64_t none = 0;
    const int64_t* shape = one.shape || output ? one.shape : &none;
    found.push_back({one.name, one.type, one.axes, shape, static_cast<char*>(one.data), one.bytes});
  }
  return found;
}

}  // namespace
}  // namespace twofour

using namespace twofour;

const char* twofour_version(void) { return TWOFOUR_LIBRARY_VERSION; }

int32_t twofour_abi(void) { return TWOFOUR_ABI; }

twofour_status twofour_load(const char* path, const twofour_options* options, twofour_model** model, char* error,
                            size_t error_size) {
  return load("twofour_load", model, error, error_size, [&] {
    require(path != nullptr, "`path` is NULL");
    const twofour_options how = read_options(options);
    uint64_t size;
    AlignedMemory memory = read_file(path, &size);
    return make(std::move(memory), size, how);
  });
}

twofour_status twofour_load_memory(const void* data, size_t size, const twofour_options* options, twofour_model** model,
                                   char* error, size_t error_size) {
  return load("twofour_load_memory", model, error, error_size, [&] {
    require(data != nullptr, "`data` is NULL");
    const twofour_options how = read_options(options);
    AlignedMemory memory = aligned_memory(size);
    std::memcpy(memory.get(), data, size);
    return make(std::move(memory), size, how);
  });
}

void twofour_free(twofour_model* model) { delete model; }

int32_t twofour_programs(const twofour_model* model) {
  return model ? static_cast<int32_t>(model->model.programs().size()) : 0;
}
int32_t twofour_inputs(const twofour_model* model, int32_t program) {
  const Program* found = program_of(model, program);
  return found ? static_cast<int32_t>(found->inputs.size()) : 0;
}
int32_t twofour_outputs(const twofour_model* model, int32_t program) {
  const Program* found = program_of(model, program);
  return found ? static_cast<int32_t>(found->outputs.size()) : 0;
}

twofour_status twofour_input(const twofour_model* model, int32_t program, int32_t index, twofour_description* description) {
  const Program* found = program_of(model, program);
  return found ? describe(found->inputs, index, description) : TWOFOUR_ARGUMENT;
}
twofour_status twofour_output(const twofour_model* model, int32_t program, int32_t index, twofour_description* description) {
  const Program* found = program_of(model, program);
  return found ? describe(found->outputs, index, description) : TWOFOUR_ARGUMENT;
}

twofour_status twofour_run(twofour_model* model, const twofour_tensor* inputs, size_t input_count, const twofour_tensor* outputs,
                           size_t output_count, char* error, size_t error_size) {
  return guarded("twofour_run", TWOFOUR_REFUSED, error, error_size, [&] {
    require(model != nullptr, "`model` is NULL");
    model->model.run(read_tensors(inputs, input_count, false), read_tensors(outputs, output_count, true));
  });
}
