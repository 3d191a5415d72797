/* Loads a file for libtwofour, prints what its programs take and give, and runs one of them many times.
 *
 *   cc -std=c99 -O2 -I INCLUDE run.c -o run PATH/libtwofour.so.1 -Wl,-rpath,PATH
 *   ./run model.2f4 [--runs 1000] [--threads 1] [--program 0] [--in FILE] [--out FILE]
 *
 * --in: the numbers of all inputs in their order, as they stand in memory; without it they are zeros. --out: the outputs,
 * written the same way after the last run. `python -c 'import twofour.export.runtime as r; print(r.library(), r.include())'`
 * says where the library and the folder of its header are. */
#define _POSIX_C_SOURCE 200112L

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <twofour.h>

static const char *const types[] = {"float32", "bfloat16", "uint8", "int8", "bool", "int64"};

static double now(void) {
  struct timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

static void print(const char *role, const twofour_description *one) {
  printf("  %s %s: %s (", role, one->name, types[one->type]);
  for (int32_t i = 0; i < one->axes; i++) printf("%s%lld", i ? ", " : "", (long long)one->shape[i]);
  printf("), %llu bytes\n", (unsigned long long)one->bytes);
}

/* Memory for one input or output; whoever calls frees it. */
static int make(const twofour_description *one, twofour_tensor *tensor) {
  tensor->name = one->name;
  tensor->type = one->type;
  tensor->axes = one->axes;
  tensor->shape = one->shape;
  tensor->bytes = one->bytes;
  tensor->data = calloc(1, (size_t)one->bytes);
  return tensor->data != NULL;
}

static int transfer(const char *path, const char *mode, twofour_tensor *tensors, int32_t count) {
  FILE *file = fopen(path, mode);
  int fine = file != NULL;
  for (int32_t i = 0; fine && i < count; i++) {
    const size_t bytes = (size_t)tensors[i].bytes;
    fine = bytes == (*mode == 'r' ? fread(tensors[i].data, 1, bytes, file) : fwrite(tensors[i].data, 1, bytes, file));
  }
  if (file != NULL && fclose(file) != 0) fine = 0;
  if (!fine) fprintf(stderr, "%s cannot be %s\n", path, *mode == 'r' ? "read" : "written");
  return fine;
}

int main(int argc, char **argv) {
  const char *in = NULL, *out = NULL;
  long runs = 1000, program = 0;
  twofour_options options;
  memset(&options, 0, sizeof options);
  options.size = sizeof options;
  if (argc % 2 != 0 || argc < 2) {
    fprintf(stderr, "usage: %s FILE [--runs N] [--threads N] [--program N] [--in FILE] [--out FILE]\n", argv[0]);
    return 2;
  }
  for (int i = 2; i + 1 < argc; i += 2) {
    if (strcmp(argv[i], "--runs") == 0) runs = atol(argv[i + 1]);
    else if (strcmp(argv[i], "--threads") == 0) options.threads = atoi(argv[i + 1]);
    else if (strcmp(argv[i], "--program") == 0) program = atol(argv[i + 1]);
    else if (strcmp(argv[i], "--in") == 0) in = argv[i + 1];
    else if (strcmp(argv[i], "--out") == 0) out = argv[i + 1];
  }

  char error[1024];
  twofour_model *model;
  const double begun = now();
  if (twofour_load(argv[1], &options, &model, error, sizeof error) != TWOFOUR_OK) {
    fprintf(stderr, "%s\n", error);
    return 1;
  }
  printf("twofour %s, loaded in %.1f ms, %d programs\n", twofour_version(), 1e3 * (now() - begun), twofour_programs(model));
  for (int32_t p = 0; p < twofour_programs(model); p++) {
    twofour_description one;
    printf("program %d\n", p);
    for (int32_t i = 0; twofour_input(model, p, i, &one) == TWOFOUR_OK; i++) print("input", &one);
    for (int32_t i = 0; twofour_output(model, p, i, &one) == TWOFOUR_OK; i++) print("output", &one);
  }

  const int32_t inputs = twofour_inputs(model, (int32_t)program), outputs = twofour_outputs(model, (int32_t)program);
  const size_t count = (size_t)inputs + (size_t)outputs;
  twofour_tensor *tensors = calloc(count + 1, sizeof *tensors);
  int fine = tensors != NULL && outputs > 0;
  for (int32_t i = 0; fine && i < inputs + outputs; i++) {
    twofour_description one;
    const int input = i < inputs;
    if (input) twofour_input(model, (int32_t)program, i, &one);
    else twofour_output(model, (int32_t)program, i - inputs, &one);
    fine = make(&one, &tensors[i]);
  }
  if (!fine) fprintf(stderr, "no program %ld, or no memory\n", program);
  if (fine && in != NULL) fine = transfer(in, "rb", tensors, inputs);

  double least = 1e30, all = 0;
  for (long i = 0; fine && i < runs; i++) {
    const double start = now();
    fine = twofour_run(model, tensors, (size_t)inputs, tensors + inputs, (size_t)outputs, error, sizeof error) == TWOFOUR_OK;
    const double took = now() - start;
    if (i == 0) printf("first run ended %.1f ms after the start\n", 1e3 * (now() - begun));
    all += took;
    if (took < least) least = took;
    if (!fine) fprintf(stderr, "%s\n", error);
  }
  if (fine && runs > 0) printf("%ld runs: %.4f ms each, %.4f at best\n", runs, 1e3 * all / (double)runs, 1e3 * least);
  if (fine && out != NULL) fine = transfer(out, "wb", tensors + inputs, outputs);

  for (size_t i = 0; tensors != NULL && i < count; i++) free(tensors[i].data);
  free(tensors);
  twofour_free(model);
  return fine ? 0 : 1;
}
