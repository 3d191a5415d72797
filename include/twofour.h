/* libtwofour: runs compiled models without Python and without torch. C99.
 *
 *   twofour_model *model;
 *   char error[1024];
 *   if (twofour_load("model.2f4", NULL, &model, error, sizeof error) != TWOFOUR_OK) { ... error is a text ... }
 *   twofour_run(model, inputs, 2, outputs, 1, error, sizeof error);
 *   twofour_free(model);
 *
 * A file is written by twofour.export.to_runtime in Python, or `twofour export --to runtime`: docs/runtime.md. It holds a
 * program for each set of input shapes that it was written for; a run takes the program whose inputs have the shapes given.
 *
 * Errors: every function that can fail returns a twofour_status. Where `error` is not NULL, it then holds a text of at most
 * `error_size` bytes, its final zero among them: what was wrong, what was found and wanted, and what to try. On success it
 * holds "". No input makes the library end the process, but for memory that is not there: pointers must be NULL or point at
 * as many bytes as their descriptions say.
 *
 * Owners: what a caller passes stays the caller's and is not used after the call. What the library hands out belongs to the
 * model and is there until twofour_free.
 *
 * Threads: a model may be run by several threads at once; each run has memory of its own, which the model keeps for the
 * next. twofour_free must not overlap another call with that model. The library is not unloaded by dlclose: its threads
 * wait for their next work until the process ends. After fork a child must not run a model which another thread was running.
 */
#ifndef TWOFOUR_H
#define TWOFOUR_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define TWOFOUR_API __attribute__((visibility("default")))
#else
#define TWOFOUR_API
#endif

/* The number of this interface: it changes when a program that was compiled before would no longer be right. */
#define TWOFOUR_ABI 1

typedef enum twofour_status {
  TWOFOUR_OK = 0,
  TWOFOUR_ARGUMENT = 1,    /* NULL where there must be something, or a number that means nothing */
  TWOFOUR_FILE = 2,        /* the file cannot be opened or read */
  TWOFOUR_DAMAGED = 3,     /* the bytes are no file of this format, or not as they were written */
  TWOFOUR_VERSION = 4,     /* a file of a version of the format that this library does not read */
  TWOFOUR_UNSUPPORTED = 5, /* the file needs a kernel of another library, or instructions that this CPU does not have */
  TWOFOUR_INPUT = 6,       /* inputs or outputs have other names, types or shapes than any program's */
  TWOFOUR_MEMORY = 7,      /* the system grants no memory */
  TWOFOUR_REFUSED = 8      /* a kernel refused a value, as of an index beyond its table, or what the file says of a call */
} twofour_status;

typedef enum twofour_type {
  TWOFOUR_FLOAT32 = 0,
  TWOFOUR_BFLOAT16 = 1, /* the upper 16 bits of a float32 */
  TWOFOUR_UINT8 = 2,
  TWOFOUR_INT8 = 3,
  TWOFOUR_BOOL = 4, /* a byte, 0 or 1 */
  TWOFOUR_INT64 = 5
} twofour_type;

typedef struct twofour_model twofour_model;

/* Calls each(data, place) once for every place from 0 to count - 1, all at once and each on a thread of its own, of which the
 * calling thread may be one, and returns when all have ended. They wait for each other: run one after the other they would
 * wait for ever. `count` is at most the `threads` of the options. Where several threads run models, it may be called by each
 * of them at once, and must then have `count` threads for each call. */
typedef void (*twofour_parallel)(void *pool, int64_t count, void (*each)(void *data, int64_t place), void *data);

/* How a model is run. Fill it with zeros, then `size` with sizeof(twofour_options): fields that later versions add are then
 * known not to be there. A library refuses those that it does not know, where they are not zero. */
typedef struct twofour_options {
  size_t size;
  int32_t threads;           /* of each run, 1 to 1024; 0: 1 */
  twofour_parallel parallel; /* NULL: a pool of the library's, shared by all models */
  void *pool;                /* handed to `parallel`; the caller keeps it alive until twofour_free */
} twofour_options;

/* What a program takes or gives. Pointers belong to the model. */
typedef struct twofour_description {
  const char *name;
  int32_t type; /* a twofour_type */
  int32_t axes; /* 0 to 16 */
  const int64_t *shape; /* `axes` sizes, each at least 1 */
  uint64_t bytes; /* of the whole tensor */
} twofour_description;

/* A tensor of a run: numbers in the order of its shape, the last axis densest, without gaps. */
typedef struct twofour_tensor {
  const char *name;
  int32_t type; /* a twofour_type */
  int32_t axes;
  const int64_t *shape; /* `axes` sizes; of an output it may be NULL with axes 0: the program's own is then meant */
  void *data;           /* read only, of an input; a multiple of a number's size */
  uint64_t bytes;       /* that stand at `data`: exactly those of an input, at least those of an output */
} twofour_tensor;

/* The version of the library, "1.2.3". */
TWOFOUR_API const char *twofour_version(void);

/* TWOFOUR_ABI of the library. */
TWOFOUR_API int32_t twofour_abi(void);

/* Reads a model from a file, or from `size` bytes at `data`, which are copied. `options` may be NULL: one thread. On success
 * *model is to be given to twofour_free; on failure it is NULL. */
TWOFOUR_API twofour_status twofour_load(const char *path, const twofour_options *options, twofour_model **model, char *error,
                                        size_t error_size);
TWOFOUR_API twofour_status twofour_load_memory(const void *data, size_t size, const twofour_options *options,
                                               twofour_model **model, char *error, size_t error_size);

/* Frees a model; NULL is none. */
TWOFOUR_API void twofour_free(twofour_model *model);

/* How many programs a model has, and how many inputs and outputs one of them; 0 where there is no such program. */
TWOFOUR_API int32_t twofour_programs(const twofour_model *model);
TWOFOUR_API int32_t twofour_inputs(const twofour_model *model, int32_t program);
TWOFOUR_API int32_t twofour_outputs(const twofour_model *model, int32_t program);

/* Describes one of them. */
TWOFOUR_API twofour_status twofour_input(const twofour_model *model, int32_t program, int32_t index,
                                         twofour_description *description);
TWOFOUR_API twofour_status twofour_output(const twofour_model *model, int32_t program, int32_t index,
                                          twofour_description *description);

/* Runs the program whose inputs have the names, types and shapes of `inputs`, in any order, and writes those of its outputs
 * that `outputs` names. Outputs must not overlap each other or the inputs, which nobody may change meanwhile. After a
 * failure the outputs hold anything. */
TWOFOUR_API twofour_status twofour_run(twofour_model *model, const twofour_tensor *inputs, size_t input_count,
                                       const twofour_tensor *outputs, size_t output_count, char *error, size_t error_size);

#ifdef __cplusplus
}
#endif

#endif
