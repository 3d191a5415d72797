/* Runs an ONNX file in ONNX Runtime twice, with its own CPU provider and with libtwofour's before it: the largest difference of the
 * answers, and the times of both in turns.
 *
 *   cc -std=c99 -O2 examples/onnxruntime/run.c -o run -ldl -lm
 *   ./run PATH/libonnxruntime.so.1.31.1 PATH/libtwofour.so.1 model.onnx [--size 128] [--runs 100] [--threads 1]
 *
 * ONNX Runtime stands in the folder `onnxruntime/capi` of its Python wheel; `python -c 'import twofour.export.runtime as r;
 * print(r.library())'` says where libtwofour is. --size: what free sizes behind the first axis are; the first is 1. Inputs are ones. */
#define _POSIX_C_SOURCE 200112L

#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ort.h"

#define MOST 16

static const ort_table *ort;

static void check(ort_status *status, const char *what) {
  if (status == NULL) return;
  fprintf(stderr, "%s: %s\n", what, ORT_ERROR_TEXT(ort)(status));
  ORT_FREE(ort, ORT_FREE_STATUS, status);
  exit(1);
}

static void require(int fine, const char *what) {
  if (fine) return;
  fprintf(stderr, "%s\n", what);
  exit(1);
}

static double now(void) {
  struct timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

static const ort_base *base_of(const char *path) {
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  require(library != NULL, library == NULL ? dlerror() : "");
  const ort_base *(*get)(void);
  *(void **)&get = dlsym(library, "OrtGetApiBase");
  require(get != NULL, "this library is not ONNX Runtime");
  return get();
}

/* A session; `library`: the plug-in that is put before the CPU provider, or NULL. */
static ort_session *session_of(ort_env *env, const char *model, const char *library, const char *threads) {
  ort_options *options;
  ort_session *session;
  check(ORT_CREATE_OPTIONS(ort)(&options), "options");
  check(ORT_SET_THREADS(ort)(options, atoi(threads)), "threads");
  if (library != NULL) {
    const ort_device *const *devices;
    const char *key = "threads";
    size_t count, found;
    /* Threads that spin while they wait would take the cores of the plug-in's. */
    check(ORT_ADD_ENTRY(ort)(options, "session.intra_op.allow_spinning", "0"), "entry");
    check(ORT_REGISTER(ort)(env, "twofour", library), "register");
    check(ORT_DEVICES(ort)(env, &devices, &count), "devices");
    for (found = 0; found < count; found++)
      if (strcmp(ORT_DEVICE_PROVIDER(ort)(devices[found]), "TwoFourExecutionProvider") == 0) break;
    require(found < count, "the plug-in has no device");
    check(ORT_ADD_PROVIDER(ort)(options, env, devices + found, 1, &key, &threads, 1), "provider");
  }
  check(ORT_CREATE_SESSION(ort)(env, model, options, &session), "session");
  ORT_FREE(ort, ORT_FREE_OPTIONS, options);
  return session;
}

/* A tensor of ones for an input, its free sizes 1 and then `size`; `data` is to be freed after it. */
static ort_value *input_of(const ort_session *session, size_t index, const ort_memory *memory, int64_t size, void **data) {
  ort_type *type;
  const ort_tensor_info *info;
  ort_value *value;
  int64_t sizes[MOST], count = 1;
  size_t axes;
  int element;
  check(ORT_INPUT_TYPE(ort)(session, index, &type), "type");
  check(ORT_TENSOR_INFO(ort)(type, &info), "type");
  require(info != NULL, "an input is no tensor");
  check(ORT_ELEMENT_TYPE(ort)(info, &element), "type");
  check(ORT_AXES(ort)(info, &axes), "axes");
  require(axes <= MOST && (element == ORT_FLOAT || element == ORT_INT64), "an input is not float32 or int64");
  check(ORT_SIZES(ort)(info, sizes, axes), "sizes");
  ORT_FREE(ort, ORT_FREE_TYPE, type);
  for (size_t i = 0; i < axes; i++) {
    if (sizes[i] < 0) sizes[i] = i == 0 ? 1 : size;
    count *= sizes[i];
  }
  const size_t bytes = (size_t)count * (element == ORT_FLOAT ? sizeof(float) : sizeof(int64_t));
  *data = malloc(bytes > 0 ? bytes : 1);
  require(*data != NULL, "no memory");
  for (int64_t i = 0; i < count; i++) {
    if (element == ORT_FLOAT) ((float *)*data)[i] = 1;
    else ((int64_t *)*data)[i] = 1;
  }
  check(ORT_CREATE_TENSOR(ort)(memory, *data, bytes, sizes, axes, element, &value), "input");
  return value;
}

int main(int argc, char **argv) {
  int64_t size = 128;
  long runs = 100;
  const char *threads = "1";
  require(argc >= 4 && argc % 2 == 0, "run LIBONNXRUNTIME LIBTWOFOUR MODEL [--size 128] [--runs 100] [--threads 1]");
  for (int i = 4; i < argc; i += 2) {
    if (strcmp(argv[i], "--size") == 0) size = strtoll(argv[i + 1], NULL, 10);
    else if (strcmp(argv[i], "--runs") == 0) runs = strtol(argv[i + 1], NULL, 10);
    else if (strcmp(argv[i], "--threads") == 0) threads = argv[i + 1];
    else require(0, "no such option");
  }
  require(size > 0 && runs > 0, "--size and --runs take numbers of at least 1");

  const ort_base *base = base_of(argv[1]);
  ort = base->get(ORT_VERSION_OF_TABLE);
  require(ort != NULL, "this ONNX Runtime is older than 1.23");
  ort_env *env;
  ort_memory *memory;
  ort_allocator *allocator;
  check(ORT_CREATE_ENV(ort)(ORT_WARNING, "run", &env), "environment");
  check(ORT_CPU_MEMORY(ort)(0, 0, &memory), "memory");
  check(ORT_ALLOCATOR(ort)(&allocator), "allocator");
  ort_session *sessions[] = {session_of(env, argv[3], NULL, threads), session_of(env, argv[3], argv[2], threads)};

  size_t inputs, outputs;
  check(ORT_INPUT_COUNT(ort)(sessions[0], &inputs), "inputs");
  check(ORT_OUTPUT_COUNT(ort)(sessions[0], &outputs), "outputs");
  require(inputs <= MOST && outputs >= 1 && outputs <= MOST, "too many inputs or outputs");
  char *in[MOST], *out[MOST];
  void *data[MOST];
  ort_value *given[MOST], *answers[2][MOST] = {{NULL}, {NULL}};
  for (size_t i = 0; i < inputs; i++) {
    check(ORT_INPUT_NAME(ort)(sessions[0], i, allocator, &in[i]), "name");
    given[i] = input_of(sessions[0], i, memory, size, &data[i]);
  }
  for (size_t i = 0; i < outputs; i++) check(ORT_OUTPUT_NAME(ort)(sessions[0], i, allocator, &out[i]), "name");

  double least[2] = {1e30, 1e30}, all[2] = {0, 0};
  for (long run = -1; run < runs; run++)
    for (int which = 0; which < 2; which++) {
      for (size_t i = 0; i < outputs; i++) {
        if (answers[which][i] != NULL) ORT_FREE(ort, ORT_FREE_VALUE, answers[which][i]);
        answers[which][i] = NULL;
      }
      const double start = now();
      check(ORT_RUN(ort)(sessions[which], NULL, (const char *const *)in, (const ort_value *const *)given, inputs,
                         (const char *const *)out, outputs, answers[which]), "run");
      const double took = now() - start;
      if (run < 0) continue; /* the first one measures kernels */
      all[which] += took;
      if (took < least[which]) least[which] = took;
    }
  float *numbers[2], most = 0, largest = 0;
  size_t bytes;
  check(ORT_BYTES(ort)(answers[0][0], &bytes), "bytes");
  for (int which = 0; which < 2; which++) check(ORT_TENSOR_DATA(ort)(answers[which][0], (void **)&numbers[which]), "answer");
  for (size_t i = 0; i < bytes / sizeof(float); i++) {
    const float difference = fabsf(numbers[0][i] - numbers[1][i]);
    if (difference > most) most = difference;
    if (fabsf(numbers[0][i]) > largest) largest = fabsf(numbers[0][i]);
  }
  printf("ONNX Runtime %s, %s threads, %ld runs in turns\n", base->version(), threads, runs);
  printf("CPU provider %.3f ms, %.3f at best; with twofour %.3f ms, %.3f at best\n", 1e3 * all[0] / (double)runs, 1e3 * least[0],
         1e3 * all[1] / (double)runs, 1e3 * least[1]);
  printf("largest answer %g, largest difference %g\n", (double)largest, (double)most);

  for (int which = 0; which < 2; which++) {
    for (size_t i = 0; i < outputs; i++) ORT_FREE(ort, ORT_FREE_VALUE, answers[which][i]);
    ORT_FREE(ort, ORT_FREE_SESSION, sessions[which]);
  }
  for (size_t i = 0; i < inputs; i++) {
    ORT_FREE(ort, ORT_FREE_VALUE, given[i]);
    check(ORT_ALLOCATOR_FREE(ort)(allocator, in[i]), "free");
    free(data[i]);
  }
  for (size_t i = 0; i < outputs; i++) check(ORT_ALLOCATOR_FREE(ort)(allocator, out[i]), "free");
  check(ORT_UNREGISTER(ort)(env, "twofour"), "unregister");
  ORT_FREE(ort, ORT_FREE_MEMORY, memory);
  ORT_FREE(ort, ORT_FREE_ENV, env);
  return most <= 1e-5f * (largest > 1 ? largest : 1) ? 0 : 1;
}
