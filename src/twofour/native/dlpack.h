// The part of DLPack 1.3 (dmlc/dlpack, include/dlpack/dlpack.h, Apache 2.0) that reads a tensor: its ABI is stable within
// a major version.
#pragma once

#include <cstdint>

namespace twofour {

constexpr uint32_t kDlpackMajor = 1;
constexpr int32_t kDLCPU = 1;
enum DLCode : uint8_t { kDLInt = 0, kDLUInt = 1, kDLFloat = 2, kDLBfloat = 4, kDLBool = 6 };

struct DLDevice {
  int32_t device_type, device_id;
};
struct DLDataType {
  uint8_t code, bits;
  uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t *shape, *strides;  // in the tensor itself; strides in numbers
  uint64_t byte_offset;
};

// What `torch.Tensor.__dlpack_c_exchange_api__` points to. Only the functions that are called have their types.
struct DLPackExchangeAPI {
  struct {
    uint32_t major, minor;
  } version;
  DLPackExchangeAPI* previous;
  void *allocate, *managed_from_object, *managed_to_object;
  int (*dltensor_from_py_object_no_sync)(void* object, DLTensor* out);  // 0, or -1 with a Python error set
  void* current_work_stream;
};

}  // namespace twofour
