// Convolutions in a row by strips of the last one's rows: which rows of each are computed when, and where they stand.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels/convolutions.h"
#include "native/integers.h"

namespace twofour {

struct RowRange {
  int64_t begin, end;
  int64_t count() const { return end - begin; }
};

// The rows that outputs `out` of an axis read.
inline RowRange read_by(const ConvAxis& a, RowRange out) {
  const auto inside = [&](int64_t row) { return row < 0 ? 0 : row < a.input ? row : a.input; };
  const int64_t first = out.begin * a.stride - a.padding;
  const int64_t end = (out.end - 1) * a.stride - a.padding + (a.taps - 1) * a.dilation + 1;
  return {inside(first), inside(end)};
}

// Whether the window of every output meets the image.
inline bool all_meet(const ConvAxis& a) {
  return a.padding <= (a.taps - 1) * a.dilation && (a.output - 1) * a.stride - a.padding < a.input;
}

// One convolution of one strip. Rows that the next one reads again move to the beginning of its lines before.
struct StripStep {
  size_t conv;
  RowRange reads, writes;
  int64_t moved, kept;     // `kept` rows stand behind `moved` others
  int64_t source, target;  // the first row in the lines that it reads, and in those that it writes
};

// Each convolution is given as of whole images; `x` is that of the first, `y` that of the last.
struct ConvChain {
  std::vector<const ConvolutionRow*> kernels;
  std::vector<Convolution> convs;
  int64_t rows;  // of the last one's in a strip

  std::vector<StripStep> steps;
  std::vector<int64_t> lines;  // most rows that stand between a convolution and the next
  int64_t together = 1;        // images of a strip
  int64_t workspace = 0;       // bytes, of whichever convolution takes most

  // Finds the steps; the members above are given.
  void plan() {
    const int64_t high = convs.back().height.output;
    if (rows >= high) together = convs[0].images;
    lines.assign(convs.size(), 0);
    std::vector<RowRange> held(convs.size(), RowRange{0, 0});
    for (int64_t row = 0; row < high; row += rows) add_strip({row, least(row + rows, high)}, &held);
    for (const StripStep& step : steps) {
      const int64_t bytes = kernels[step.conv]->workspace_bytes(*kernels[step.conv]->row, part(step, nullptr, nullptr, 0));
      if (bytes > workspace) workspace = bytes;
    }
  }
  bool whole() const { return rows >= convs.back().height.output; }

  // The rows of a strip from the last convolution back to the first, then its steps from the first on.
  void add_strip(RowRange out, std::vector<RowRange>* held) {
    std::vector<StripStep> strip;
    for (size_t i = convs.size(); i-- > 0;) {
      const bool last = i + 1 == convs.size();
      RowRange& have = (*held)[i];
      const RowRange fresh{last || out.begin > have.end ? out.begin : have.end, out.end};
      if (fresh.count() <= 0) break;  // nor do those before it have anything to do
      const int64_t kept = last ? 0 : fresh.begin - out.begin;
      StripStep step{i, whole() ? RowRange{0, convs[i].height.input} : read_by(convs[i].height, fresh), fresh,
                     kept > 0 ? out.begin - have.begin : 0, kept, 0, last ? 0 : out.begin};
      have = out;
      if (out.count() > lines[i]) lines[i] = out.count();
      strip.push_back(step);
      out = whole() && i > 0 ? RowRange{0, convs[i - 1].height.output} : step.reads;
    }
    for (size_t s = strip.size(); s-- > 0;) {
      strip[s].source = strip[s].conv == 0 ? 0 : (*held)[strip[s].conv - 1].begin;
      steps.push_back(strip[s]);
    }
  }

  int64_t line(size_t i) const { return convs[i].width.output * convs[i].out_channels; }  // floats of a row
  int64_t line_floats(size_t i) const { return i + 1 == convs.size() ? 0 : round_up(lines[i] * line(i) * together, 16); }
  int64_t bytes() const {
    int64_t all = round_up(workspace, 64);
    for (size_t i = 0; i < convs.size(); i++) all += line_floats(i) * 4;
    return all;
  }

  // The convolution of a step of the images from `image` on, which reads from the lines `x` and writes to `y`.
  Convolution part(const StripStep& step, const float* x, float* y, int64_t image) const {
    Convolution c = convs[step.conv];
    const ConvAxis& h = convs[step.conv].height;
    const int64_t row = line(step.conv), read = c.width.input * (c.plane ? 1 : c.in_channels);
    c.images = together;
    c.height = {step.reads.count(), step.writes.count(), h.taps, h.stride,
                step.reads.begin - (step.writes.begin * h.stride - h.padding), h.dilation};
    if (x) c.x = x + (step.reads.begin - step.source) * read;
    if (y) c.y = y + (step.writes.begin - step.target) * row;
    if (c.other) c.other += (image * h.output + step.writes.begin) * row;
    return c;
  }

  void run(char* memory) const {
    std::vector<float*> between(convs.size(), nullptr);
    float* next = reinterpret_cast<float*>(memory + round_up(workspace, 64));
    for (size_t i = 0; i + 1 < convs.size(); i++) between[i] = next, next += line_floats(i);
    const Convolution &first = convs.front(), &last = convs.back();
    for (int64_t image = 0; image < first.images; image += together)
      for (const StripStep& step : steps) {
        const size_t i = step.conv;
        if (step.kept > 0 && step.moved > 0)
          std::memmove(between[i], between[i] + step.moved * line(i), static_cast<size_t>(step.kept * line(i)) * 4);
        const float* x = i > 0 ? between[i - 1] : first.x + image * first.height.input * first.width.input * first.in_channels;
        float* y = i + 1 < convs.size() ? between[i] : last.y + image * last.height.output * line(i);
        Convolution c = part(step, x, y, image);
        c.workspace = memory;
        kernels[i]->run(*kernels[i]->row, c);
      }
  }
};

}  // namespace twofour
