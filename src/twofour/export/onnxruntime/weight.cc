#include "weight.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <ctime>
#include <limits>
#include <string>
#include <tuple>

#include "kernels/fused_matmul/fused_matmul.h"
#include "kernels/nm_compress/nm_compress.h"
#include "native/isa.h"
#include "ort.h"

namespace twofour::ort {
namespace {

constexpr int64_t kMostRaced = 1024;      // tokens: more are measured on their first ones
constexpr double kRaceSeconds = 0.03;     // for rounds behind the first two
constexpr int kRaceRounds = 7;

// (out, in, power of two of tokens, threads) -> the kernel, for every weight of the process.
std::mutex chosen_mutex;
std::map<std::tuple<int64_t, int64_t, int, int>, const Product*>& chosen() {
  static auto& all = *new std::map<std::tuple<int64_t, int64_t, int, int>, const Product*>;
  return all;
}

// The place of an instruction set in the list: parents stand above their children.
int rank(const char* isa) {
  for (size_t i = 0; i < std::size(kInstructionSets); i++)
    if (!std::strcmp(kInstructionSets[i].name, isa)) return static_cast<int>(i);
  return -1;
}

bool fits(const Product& product) {
  return product.runs && !std::strcmp(product.row->operation, "nm_matmul") && !std::strcmp(product.row->dtype, "float32");
}

// Kernels of the best instruction set that this CPU has for float32, those worth measuring for so many tokens.
std::vector<const Product*> candidates(int64_t tokens) {
  int best = -1;
  for (const Product& one : products())
    if (fits(one)) best = std::max(best, rank(one.row->isa));
  std::vector<const Product*> all, worth;
  for (const Product& one : products()) {
    if (!fits(one) || rank(one.row->isa) != best) continue;
    all.push_back(&one);
    if (one.row->least <= tokens && tokens <= one.row->most) worth.push_back(&one);
  }
  return worth.empty() ? all : worth;
}

// Seconds of this thread where it is the only one that works, so that others of the machine do not count.
double now(int threads) {
  timespec at;
  clock_gettime(threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &at);
  return static_cast<double>(at.tv_sec) + 1e-9 * static_cast<double>(at.tv_nsec);
}

double seconds_of(const Part& part, const float* x, float* y, int64_t tokens, int threads) {
  static Scratch scratch;
  const FusedMatmul all{{}, {}, part, Activation::none, {Activation::none, Combine::none, nullptr, 0}, {}, {}, Type::f32,
                        reinterpret_cast<const char*>(x), part.in, reinterpret_cast<char*>(y), reinterpret_cast<char*>(y),
                        tokens, part.in, threads};
  const double begin = now(threads);
  FusedRun(all, scratch).run();
  return now(threads) - begin;
}

}  // namespace

bool is_two_four(const DenseWeight& weight) {
  const int64_t inner = weight.in_step == 1 ? weight.in / 4 : weight.out, outer = weight.in_step == 1 ? weight.out : weight.in / 4;
  for (int64_t a = 0; a < outer; a++) {
    const float* const row = weight.in_step == 1 ? weight.data + a * weight.out_step : weight.data + a * 4 * weight.in_step;
    const int64_t step = weight.in_step == 1 ? 4 : 1, next = weight.in_step;
    int crowded = 0;
    for (int64_t b = 0; b < inner; b++) {
      const float* const four = row + b * step;
      crowded |= (four[0] != 0) + (four[next] != 0) + (four[2 * next] != 0) + (four[3 * next] != 0) > 2;
    }
    if (crowded) return false;
  }
  return true;
}

SparseWeight::SparseWeight(const std::vector<DenseWeight>& parts) {
  shape_.in = parts.front().in;
  const bool biased = std::any_of(parts.begin(), parts.end(), [](const DenseWeight& one) { return !one.bias.empty(); });
  for (const DenseWeight& part : parts) {
    if (part.in != shape_.in)
      throw Failed("weights of " + std::to_string(shape_.in) + " and of " + std::to_string(part.in) + " inputs cannot be one");
    append(part);
    if (!biased) continue;
    std::vector<float> bias = part.bias;
    bias.resize(static_cast<size_t>(part.out));
    bias_.insert(bias_.end(), bias.begin(), bias.end());
  }
}

void SparseWeight::append(const DenseWeight& part) {
  constexpr int64_t at_once = 16;  // rows: of a weight that stands transposed, one line of the cache of every input
  const int64_t kept = part.in / 2, codes = ceil_div(part.in, 8), before = shape_.out;
  shape_.out += part.out;
  canonical_.values.resize(static_cast<size_t>(shape_.out * kept));
  canonical_.indices.resize(static_cast<size_t>(shape_.out * codes));
  std::vector<float> rows(static_cast<size_t>(at_once * part.in));
  for (int64_t first = 0; first < part.out; first += at_once) {
    const int64_t count = least(at_once, part.out - first);
    const float* from = part.data + first * part.out_step;
    for (int64_t i = 0; i < part.in; i++)
      for (int64_t r = 0; r < count; r++) rows[static_cast<size_t>(r * part.in + i)] = from[r * part.out_step + i * part.in_step];
    nm_compress_2x4_f32__scalar({rows.data(), part.in, count, part.in, canonical_.values.data() + (before + first) * kept,
                                 canonical_.indices.data() + (before + first) * codes, 1});
  }
}

// From the canonical form, which is made anew of a layout where it is gone.
AlignedMemory SparseWeight::packed(const Layout& layout) {
  Canonical made;
  const Canonical* from = &canonical_;
  if (!layouts_.empty()) {
    const auto& [kind, bytes] = *layouts_.begin();
    made.values.resize(static_cast<size_t>(shape_.out * (shape_.in / 2)));
    made.indices.resize(static_cast<size_t>(shape_.out * ceil_div(shape_.in, 8)));
    kind->unpack(shape_, bytes.get(), {made.values.data(), made.indices.data(), nullptr, nullptr});
    from = &made;
  }
  AlignedMemory memory = aligned_memory(static_cast<uint64_t>(layout.bytes(shape_)));
  layout.pack(shape_, {from->values.data(), from->indices.data(), nullptr, nullptr}, memory.get());
  return memory;
}

Part SparseWeight::with(const Product& product, const AlignedMemory& packed) const {
  return {&product, packed.get(), bias_.empty() ? nullptr : bias_.data(), shape_.out, shape_.in, 0, false};
}

Part SparseWeight::part(const float* x, int64_t tokens, int threads) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::tuple key{shape_.out, shape_.in, static_cast<int>(std::bit_width(static_cast<uint64_t>(tokens - 1))), threads};
  const Product* product;
  {
    const std::lock_guard<std::mutex> every(chosen_mutex);
    const auto found = chosen().find(key);
    product = found == chosen().end() ? chosen()[key] = race(x, least(tokens, kMostRaced), threads) : found->second;
  }
  const Layout* layout = layout_called(product->row->layout);
  auto found = layouts_.find(layout);
  if (found == layouts_.end()) {
    AlignedMemory made = packed(*layout);
    found = layouts_.emplace(layout, std::move(made)).first;
    canonical_ = {};
  }
  return with(*product, found->second);
}

const Product* SparseWeight::race(const float* x, int64_t tokens, int threads) {
  std::map<std::string, AlignedMemory> packs;
  std::vector<std::pair<const Product*, double>> times;
  for (const Product* one : candidates(tokens)) {
    times.emplace_back(one, std::numeric_limits<double>::infinity());
    if (packs.find(one->row->layout) == packs.end()) packs.emplace(one->row->layout, packed(*layout_called(one->row->layout)));
  }
  std::vector<float> y(static_cast<size_t>(tokens * shape_.out)), zeros(static_cast<size_t>(x ? 0 : tokens * shape_.in));
  if (!x) x = zeros.data();
  const auto faster = [](const auto& a, const auto& b) { return a.second < b.second; };
  const double begin = now(threads);
  for (int round = 0; round < kRaceRounds && times.size() > 1; round++) {
    for (auto& [one, best] : times)
      best = std::min(best, seconds_of(with(*one, packs.at(one->row->layout)), x, y.data(), tokens, threads));
    const double limit = 2 * std::min_element(times.begin(), times.end(), faster)->second;
    std::erase_if(times, [&](const auto& one) { return one.second > limit; });
    if (round > 0 && now(threads) - begin > kRaceSeconds) break;
  }
  return std::min_element(times.begin(), times.end(), faster)->first;
}

}  // namespace twofour::ort
