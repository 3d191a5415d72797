// The search over groups of stripes, with escapes (Pool and Yu 2021, section 4), and rounds of linear assignment.
#include "stripes.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <memory>
#include <new>
#include <vector>

#include "assignment.h"
#include "native/parallel.h"
#include "random.h"

namespace twofour {
namespace {

// A gain below this share of what a group keeps is rounding.
constexpr double kSmallest = 1e-6;

// Swaps of an escape: after one, most descents lead back. On 128 x 64 uniform values, 100 escapes and five seeds the
// mean efficacy was 35.6 % with 1 swap, 36.8 % with 2, 37.7 % with 4 and 37.8 % with 6.
constexpr int kSwaps = 6;

// Values summed (rows x subsets x groups) below which starting threads costs more: some 0.5 ms of one core.
constexpr int64_t kWorthThreads = 8'000'000;

// A choice of a part takes about the time of this many values summed.
constexpr int64_t kChoice = 16;

// Values summed between two calls of `tell`: less than a second of one core.
constexpr int64_t kBetweenTells = 5'000'000'000;

// As parallel_for, for a body that allocates: an exception may not leave a thread of a team, which would end the
// process, so the only one that it has, of memory that is not there, is thrown here.
template <class Body>
void parallel_for_allocating(int64_t count, int64_t grain, int threads, const Body& body) {
  std::atomic<bool> failed{false};
  parallel_for(count, grain, threads, [&](int64_t begin, int64_t end) {
    try {
      body(begin, end);
    } catch (...) {
      failed = true;
    }
  });
  if (failed) throw std::bad_alloc();
}

struct Aligned {
  void operator()(float* p) const { ::operator delete[](p, std::align_val_t{64}); }
};
using Floats = std::unique_ptr<float[], Aligned>;

Floats floats(int64_t count) {
  return Floats(static_cast<float*>(::operator new[](static_cast<size_t>(count) * sizeof(float), std::align_val_t{64})));
}

// A part that a deal of a set of columns may begin with, and the set that is left.
struct Choice {
  int32_t part, rest;  // numbers among the subsets and, behind them, the sets
};

// Every subset of m of `width` columns in lexicographic order, and the best of all ways to deal the columns into such
// subsets, found without listing the ways. In a deal the part with the lowest column comes first, so what the best deal
// of a set keeps is the best over that part of what the part keeps and what the best deal of the rest does; a set that
// several parts leave over is looked at once. 20 columns of 2:4 have 2,546,168,625 ways and 4,355,774 such choices.
struct Deals {
  int width, m, parts;
  std::vector<uint8_t> subsets;  // m columns each
  std::vector<int32_t> place;    // set of columns as bits -> its number
  std::vector<Choice> choices;   // of every set of 2 m, 3 m ... columns that deals leave over; last those of all columns
  std::vector<int64_t> starts;   // where the choices of a set start, and the end

  Deals(int width, int m) : width(width), m(m), parts(width / m), place(size_t{1} << width, -1), starts{0} {
    list_subsets(0, 0, 0);
    for (uint32_t set = 1; set >> width == 0; ++set) {
      const int taken = std::popcount(set);
      // Each part that is gone had a column lower than all that are left.
      if (taken <= m || taken % m || std::countr_zero(set) < parts - taken / m) continue;
      uint32_t bits[kStripeMaxWindow];
      int count = 0;
      for (uint32_t left = set; left; left &= left - 1) bits[count++] = left & -left;
      const auto add = [&](uint32_t part) { choices.push_back({place[part], place[set ^ part]}); };
      choose(bits, 1, count, m - 1, bits[0], add);
      place[set] = static_cast<int32_t>(values());
      starts.push_back(static_cast<int64_t>(choices.size()));
    }
  }

  int64_t count() const { return static_cast<int64_t>(subsets.size()) / m; }
  int64_t values() const { return count() + static_cast<int64_t>(starts.size()) - 1; }

  // Fills in what the best deal of every set keeps, where kept[0 ... count) say what the subsets keep. A set comes after
  // those it contains.
  void solve(double* kept) const {
    for (int64_t set = count(); set < values(); ++set) {
      double most = 0;
      for (int64_t c = starts[set - count()]; c < starts[set - count() + 1]; ++c)
        most = std::max(most, kept[choices[c].part] + kept[choices[c].rest]);
      kept[set] = most;
    }
  }

  // The choice that the best deal of a set makes; of equals the first in lexicographic order.
  Choice best(int64_t set, const double* kept) const {
    const Choice* choice = &choices[starts[set - count()]];
    while (kept[choice->part] + kept[choice->rest] < kept[set]) ++choice;
    return *choice;
  }

  // What the order as it is keeps, added in the order of `best_part`.
  double unchanged(const double* kept) const {
    const uint32_t first = (1u << m) - 1;
    double sum = kept[place[first << (parts - 1) * m]];
    for (int p = parts - 1; p-- > 0;) sum = kept[place[first << p * m]] + sum;
    return sum;
  }

 private:
  void list_subsets(int from, int taken, uint32_t mask) {
    if (taken == m) {
      place[mask] = static_cast<int32_t>(count());
      for (int i = 0; i < width; ++i)
        if (mask >> i & 1) subsets.push_back(static_cast<uint8_t>(i));
      return;
    }
    for (int i = from; i < width; ++i) list_subsets(i + 1, taken + 1, mask | 1u << i);
  }

  template <class Visit>
  static void choose(const uint32_t* bits, int from, int count, int missing, uint32_t part, const Visit& visit) {
    if (!missing) return visit(part);
    for (int i = from; i + missing <= count; ++i) choose(bits, i + 1, count, missing - 1, part | bits[i], visit);
  }
};

// What a thread needs to look at a group.
struct Bench {
  std::vector<const float*> columns;
  std::vector<double> sums;
  Floats scratch;

  explicit Bench(const Deals& deals)
      : columns(deals.width), sums(deals.values()), scratch(floats(SubsetSums::scratch_floats(deals.width, deals.count()))) {}
};

struct Found {
  double gain, kept;
};

class Refiner {
 public:
  Refiner(const StripeSearch& search, int window)
      : a(search), deals(window, search.m), stripes(search.count / search.m), bench(deals) {
    std::vector<int32_t> group;
    list_groups(0, group);
    count = static_cast<int64_t>(groups.size()) / deals.parts;
    gains.resize(count);
    changed.assign(stripes, 1);
  }

  int64_t run(int64_t escapes) {
    SplitMix64 random{a.seed};
    descend();
    std::vector<int64_t> best_order(a.order, a.order + a.count);
    std::vector<double> best_gains = gains;
    for (int64_t escape = 0; escape < escapes && stripes >= deals.parts && stripes > 1; ++escape) {
      double lost = 0;  // of the present order against the best one
      for (int i = 0; i < kSwaps; ++i) lost += leave(random);
      lost -= descend();
      if (lost <= 0) {
        std::copy_n(a.order, a.count, best_order.begin());
        best_gains = gains;
      } else {
        std::copy(best_order.begin(), best_order.end(), a.order);
        gains = best_gains;
      }
    }
    return looked_at;
  }

 private:
  void list_groups(int64_t from, std::vector<int32_t>& group) {
    if (static_cast<int>(group.size()) == deals.parts) {
      groups.insert(groups.end(), group.begin(), group.end());
      return;
    }
    for (int64_t s = from; s < stripes; ++s) {
      group.push_back(static_cast<int32_t>(s));
      list_groups(s + 1, group);
      group.pop_back();
    }
  }

  Found look(int64_t group, Bench& at) const {
    for (int p = 0; p < deals.parts; ++p)
      for (int i = 0; i < a.m; ++i)
        at.columns[p * a.m + i] = a.columns + a.order[groups[group * deals.parts + p] * a.m + i] * a.rows;
    a.kernel->subsets({at.columns.data(), deals.width, a.n, a.m, a.rows, deals.subsets.data(), deals.count(),
                       at.sums.data(), at.scratch.get()});
    deals.solve(at.sums.data());
    const double kept = deals.unchanged(at.sums.data()), gain = at.sums.back() - kept;
    return {gain > kSmallest * kept ? gain : 0, kept};
  }

  // Looks again at the groups of changed stripes, applies what gains, and so on until nothing does. Returns the gain.
  double descend() {
    double total = 0;
    while (true) {
      look_again();
      std::vector<int64_t> gaining;
      for (int64_t g = 0; g < count; ++g)
        if (gains[g] > 0) gaining.push_back(g);
      std::stable_sort(gaining.begin(), gaining.end(), [&](int64_t x, int64_t y) { return gains[x] > gains[y]; });
      for (int64_t g : gaining)
        if (untouched(g)) {
          total += gains[g];
          look(g, bench);
          deal(g);
        }
      if (gaining.empty()) return total;
    }
  }

  void look_again() {
    std::vector<int64_t> stale;
    for (int64_t g = 0; g < count; ++g)
      if (!untouched(g)) stale.push_back(g);
    const int64_t size = static_cast<int64_t>(stale.size());
    const int64_t work = a.rows * deals.count() + kChoice * static_cast<int64_t>(deals.choices.size());
    const int threads = size * work < kWorthThreads ? 1 : a.threads;
    const int64_t step = std::max<int64_t>(16, kBetweenTells / work);
    for (int64_t from = 0; from < size; from += step) {
      parallel_for_allocating(std::min(step, size - from), 8, threads, [&](int64_t begin, int64_t end) {
        Bench own(deals);
        for (int64_t i = from + begin; i < from + end; ++i) gains[stale[i]] = look(stale[i], own).gain;
      });
      if (from + step < size) a.tell(a.told, from + step, size);
    }
    looked_at += size;
    std::fill(changed.begin(), changed.end(), 0);
  }

  bool untouched(int64_t group) const {
    for (int p = 0; p < deals.parts; ++p)
      if (changed[groups[group * deals.parts + p]]) return false;
    return true;
  }

  // Deals the columns of a group in the best way; `bench` holds what a look at it found.
  void deal(int64_t group) {
    std::vector<int64_t> before(deals.width);
    const int32_t* const members = &groups[group * deals.parts];
    for (int i = 0; i < deals.width; ++i) before[i] = a.order[members[i / a.m] * a.m + i % a.m];
    int64_t left = deals.values() - 1;
    for (int p = 0; p < deals.parts; ++p) {
      Choice taken{static_cast<int32_t>(left), 0};
      if (left >= deals.count()) taken = deals.best(left, bench.sums.data());
      const uint8_t* const subset = &deals.subsets[taken.part * a.m];
      for (int i = 0; i < a.m; ++i) a.order[members[p] * a.m + i] = before[subset[i]];
      changed[members[p]] = 1;
      left = taken.rest;
    }
  }

  // Swaps two columns of a random group, whatever it costs. Returns what it cost.
  double leave(SplitMix64& random) {
    const int64_t group = random.below(count);
    const int32_t* const members = &groups[group * deals.parts];
    const int64_t first = random.below(deals.parts), second = (first + 1 + random.below(deals.parts - 1)) % deals.parts;
    const double kept = look(group, bench).kept;
    const int64_t from = members[first] * a.m + random.below(a.m), to = members[second] * a.m + random.below(a.m);
    std::swap(a.order[from], a.order[to]);
    changed[members[first]] = changed[members[second]] = 1;
    return kept - look(group, bench).kept;
  }

  const StripeSearch& a;
  const Deals deals;
  const int64_t stripes;
  Bench bench;
  std::vector<int32_t> groups;
  int64_t count = 0, looked_at = 0;
  std::vector<double> gains;
  std::vector<char> changed;
};

// Rounds of assignment. Stripes take part in blocks: an assignment costs the cube of its size, and several rounds of
// small ones gain more than one large one in the same time.
class Assigner {
 public:
  Assigner(const StripeSearch& search, int64_t block)
      : a(search), stripes(search.count / search.m), block(std::min(block, stripes)), random{search.seed} {
    for (int64_t s = 0; s < stripes; ++s) members.push_back(s);
    position.resize(stripes);
  }

  int64_t run(int64_t rounds, int64_t patience) {
    int64_t round = 0;
    for (int64_t idle = 0; round < rounds && idle < patience; ++round) {
      if (block < stripes)
        for (int64_t s = stripes; s-- > 1;) std::swap(members[s], members[random.below(s + 1)]);
      for (int64_t s = 0; s < stripes; ++s) position[s] = members[s] * a.m + random.below(a.m);
      idle = deal_all() ? 0 : idle + 1;
    }
    return round;
  }

 private:
  bool deal_all() {
    const int64_t blocks = (stripes + block - 1) / block;
    std::vector<char> gained(blocks);
    parallel_for_allocating(blocks, 1, a.threads, [&](int64_t begin, int64_t end) {
      const Floats least = floats(block * a.rows);
      for (int64_t b = begin; b < end; ++b)
        gained[b] = deal(b * block, std::min((b + 1) * block, stripes) - b * block, least.get());
    });
    return std::find(gained.begin(), gained.end(), 1) != gained.end();
  }

  // One block: members [from, from + count) each give one column, and get one back. Tells whether that gained.
  bool deal(int64_t from, int64_t count, float* least) {
    std::vector<const float*> columns(count), others(a.m - 1);
    std::vector<double> gain(count * count);
    double before = 0, after = 0, kept = 0;
    for (int64_t s = 0; s < count; ++s) {
      const int64_t first = members[from + s] * a.m, own = position[from + s];
      for (int64_t i = first, k = 0; i < first + a.m; ++i)
        if (i != own) others[k++] = a.columns + a.order[i] * a.rows;
      columns[s] = a.columns + a.order[own] * a.rows;
      kept += a.kernel->rest({others.data(), a.n, a.m, a.rows, least + s * a.rows});
    }
    a.kernel->maxima({least, columns.data(), count, a.rows, 0, count, gain.data()});
    const std::vector<int32_t> column_of = assign(gain.data(), count);
    std::vector<int64_t> taken(count);
    for (int64_t s = 0; s < count; ++s) {
      before += gain[s * count + s], after += gain[s * count + column_of[s]];
      taken[s] = a.order[position[from + s]];
    }
    if (after - before <= kSmallest * (kept + before) / static_cast<double>(count)) return false;
    for (int64_t s = 0; s < count; ++s) a.order[position[from + s]] = taken[column_of[s]];
    return true;
  }

  const StripeSearch& a;
  const int64_t stripes, block;
  SplitMix64 random;
  std::vector<int64_t> members, position;
};

}  // namespace

int64_t refine_stripes(const StripeSearch& search, int window, int64_t escapes) {
  return Refiner(search, window).run(escapes);
}

int64_t assign_stripes(const StripeSearch& search, int64_t block, int64_t rounds, int64_t patience) {
  return Assigner(search, block).run(rounds, patience);
}

}  // namespace twofour
