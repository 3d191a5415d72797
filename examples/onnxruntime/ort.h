/* What run.c calls of ONNX Runtime: places in its table of functions, an order that is public and never changes. Declared here, so that
 * no header of it is needed: its Python wheel has the library alone. */
#ifndef TWOFOUR_EXAMPLES_ORT_H
#define TWOFOUR_EXAMPLES_ORT_H

#include <stddef.h>
#include <stdint.h>

typedef struct ort_status ort_status;
typedef struct ort_env ort_env;
typedef struct ort_device ort_device; /* a provider on a piece of hardware */
typedef struct ort_options ort_options;
typedef struct ort_session ort_session;
typedef struct ort_value ort_value;
typedef struct ort_memory ort_memory;
typedef struct ort_allocator ort_allocator;
typedef struct ort_type ort_type;
typedef struct ort_tensor_info ort_tensor_info;

enum { ORT_VERSION_OF_TABLE = 23, ORT_WARNING = 2, ORT_FLOAT = 1, ORT_INT64 = 7 };

typedef struct {
  void (*functions[390])(void);
} ort_table;
typedef struct {
  const ort_table *(*get)(uint32_t version);
  const char *(*version)(void);
} ort_base;

/* ORT(table, place, (types of the arguments))(arguments): for functions that answer with a status, NULL where all is well. */
#define ORT(table, place, types) ((ort_status * (*) types)(table)->functions[place])

#define ORT_ERROR_TEXT(table) ((const char *(*)(const ort_status *))(table)->functions[2])
#define ORT_DEVICE_PROVIDER(table) ((const char *(*)(const ort_device *))(table)->functions[312])
/* Places of functions that give things back. */
enum { ORT_FREE_ENV = 92, ORT_FREE_STATUS = 93, ORT_FREE_MEMORY = 94, ORT_FREE_SESSION = 95, ORT_FREE_VALUE = 96, ORT_FREE_TYPE = 98, ORT_FREE_OPTIONS = 100 };
#define ORT_FREE(table, place, thing) ((void (*)(void *))(table)->functions[place])(thing)

#define ORT_CREATE_ENV(table) ORT(table, 3, (int severity, const char *name, ort_env **))
#define ORT_CREATE_SESSION(table) ORT(table, 7, (const ort_env *, const char *path, const ort_options *, ort_session **))
#define ORT_RUN(table)                                                                                                        \
  ORT(table, 9, (ort_session *, const void *options, const char *const *in, const ort_value *const *inputs, size_t input_count, \
                 const char *const *out, size_t output_count, ort_value **outputs))
#define ORT_CREATE_OPTIONS(table) ORT(table, 10, (ort_options **))
#define ORT_SET_THREADS(table) ORT(table, 24, (ort_options *, int))
#define ORT_INPUT_COUNT(table) ORT(table, 30, (const ort_session *, size_t *))
#define ORT_OUTPUT_COUNT(table) ORT(table, 31, (const ort_session *, size_t *))
#define ORT_INPUT_TYPE(table) ORT(table, 33, (const ort_session *, size_t, ort_type **))
#define ORT_INPUT_NAME(table) ORT(table, 36, (const ort_session *, size_t, ort_allocator *, char **))
#define ORT_OUTPUT_NAME(table) ORT(table, 37, (const ort_session *, size_t, ort_allocator *, char **))
#define ORT_CREATE_TENSOR(table) \
  ORT(table, 49, (const ort_memory *, void *data, size_t bytes, const int64_t *sizes, size_t axes, int type, ort_value **))
#define ORT_TENSOR_DATA(table) ORT(table, 51, (ort_value *, void **))
#define ORT_TENSOR_INFO(table) ORT(table, 55, (const ort_type *, const ort_tensor_info **))
#define ORT_ELEMENT_TYPE(table) ORT(table, 60, (const ort_tensor_info *, int *))
#define ORT_AXES(table) ORT(table, 61, (const ort_tensor_info *, size_t *))
#define ORT_SIZES(table) ORT(table, 62, (const ort_tensor_info *, int64_t *, size_t axes))
#define ORT_CPU_MEMORY(table) ORT(table, 69, (int allocator, int kind, ort_memory **))
#define ORT_ALLOCATOR_FREE(table) ORT(table, 76, (ort_allocator *, void *))
#define ORT_ALLOCATOR(table) ORT(table, 78, (ort_allocator **))
#define ORT_ADD_ENTRY(table) ORT(table, 130, (ort_options *, const char *key, const char *text))
#define ORT_REGISTER(table) ORT(table, 301, (ort_env *, const char *name, const char *library))
#define ORT_UNREGISTER(table) ORT(table, 302, (ort_env *, const char *name))
#define ORT_DEVICES(table) ORT(table, 303, (const ort_env *, const ort_device *const **, size_t *))
#define ORT_ADD_PROVIDER(table)                                                                                                  \
  ORT(table, 304, (ort_options *, ort_env *, const ort_device *const *, size_t count, const char *const *keys, const char *const *values, \
                   size_t options))
#define ORT_BYTES(table) ORT(table, 318, (const ort_value *, size_t *))

#endif
