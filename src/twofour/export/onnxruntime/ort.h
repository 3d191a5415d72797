// ONNX Runtime's C interface as far as a plug-in execution provider needs it: the order of functions in its tables and of the
// fields of the structures that a provider fills is public and only ever grows at its end. No header of it is needed; what is
// declared here is version 23, which every onnxruntime from 1.23 on serves; provider.cc says why 1.23.0 is refused.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace twofour::ort {

constexpr uint32_t kVersion = 23;

struct Status;
struct Value;
struct TypeInfo;
struct TensorInfo;
struct KernelContext;
struct SessionOptions;
struct Logger;
struct Attribute;
struct ValueInfo;
struct NodeHandle;
struct GraphHandle;
struct HardwareDevice;
struct KeyValuePairs;
struct EpDevice;
struct SupportInfo;
struct ComputeContext;
struct Factory;
struct Ep;
#ifdef _WIN32
using PathChar = wchar_t;
#else
using PathChar = char;
#endif

constexpr int kFail = 1;                      // OrtErrorCode
constexpr int kCpu = 0;                       // OrtHardwareDeviceType
constexpr int kInfo = 1, kWarning = 2;        // OrtLoggingLevel
constexpr int kFloat = 1, kInt64 = 7;         // ONNXTensorElementDataType
constexpr int kIntAttribute = 1, kIntsAttribute = 2, kFloatAttribute = 3, kStringAttribute = 5;  // OrtOpAttrType

struct FusionOptions {
  uint32_t version = kVersion;
  bool drop_constant_initializers = true;  // they are packed by then; the runtime frees its own
};

struct ComputeInfo {
  uint32_t version = kVersion;
  Status* (*create_state)(ComputeInfo*, ComputeContext*, void** state);
  Status* (*compute)(ComputeInfo*, void* state, KernelContext*);
  void (*release_state)(ComputeInfo*, void* state);
};

// Functions behind those that are named stay null, which says that a provider does not have them.
struct Ep {
  uint32_t version = kVersion;
  const char* (*name)(const Ep*) = nullptr;
  Status* (*get_capability)(Ep*, const GraphHandle*, SupportInfo*) = nullptr;
  Status* (*compile)(Ep*, const GraphHandle**, const NodeHandle** fused, size_t count, ComputeInfo**, NodeHandle** contexts) = nullptr;
  void (*release_compute_infos)(Ep*, ComputeInfo**, size_t count) = nullptr;
  void* others[32] = {};
};

struct Factory {
  uint32_t version = kVersion;
  const char* (*name)(const Factory*) = nullptr;
  const char* (*vendor)(const Factory*) = nullptr;
  Status* (*supported_devices)(Factory*, const HardwareDevice* const*, size_t count, EpDevice**, size_t most, size_t* found) = nullptr;
  Status* (*create)(Factory*, const HardwareDevice* const*, const KeyValuePairs* const*, size_t count, const SessionOptions*,
                    const Logger*, Ep**) = nullptr;
  void (*release)(Factory*, Ep*) = nullptr;
  uint32_t (*vendor_id)(const Factory*) = nullptr;
  const char* (*library_version)(const Factory*) = nullptr;
  void* validate_compiled_model = nullptr;
  Status* (*create_allocator)(Factory*, const void* memory, const KeyValuePairs*, void** null_for_the_cpus) = nullptr;
  void (*release_allocator)(Factory*, void*) = nullptr;
  Status* (*create_data_transfer)(Factory*, void** null_for_none) = nullptr;
  bool (*is_stream_aware)(const Factory*) = nullptr;
  void* others[32] = {};
};

// What the runtime answered instead of doing what it was asked.
struct Failed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct EpApi {
#define TWOFOUR_ORT(...)
#define TWOFOUR_ORT_EP(place, result, name, ...)                                       \
  template <class... Given>                                                            \
  result name(Given... given) const {                                                  \
    return reinterpret_cast<result (*)(__VA_ARGS__)>(functions[place])(given...);      \
  }
#include "functions.def"
#undef TWOFOUR_ORT
#undef TWOFOUR_ORT_EP
  void (*functions[16])();
};

struct Api {
#define TWOFOUR_ORT_EP(...)
#define TWOFOUR_ORT(place, result, name, ...)                                          \
  template <class... Given>                                                            \
  result name(Given... given) const {                                                  \
    return reinterpret_cast<result (*)(__VA_ARGS__)>(functions[place])(given...);      \
  }
#include "functions.def"
#undef TWOFOUR_ORT
#undef TWOFOUR_ORT_EP
  void (*functions[390])();

  void check(Status* status) const {
    if (!status) return;
    const std::string text = GetErrorMessage(status);
    ReleaseStatus(status);
    throw Failed(text);
  }
};

struct ApiBase {
  const Api* (*get)(uint32_t version);
  const char* (*version)();
};

}  // namespace twofour::ort
