// Convolutions in a row for Python: one call, by strips.
#include <algorithm>
#include <array>

#include "kernels/conv_images.h"
#include "native/scratch.h"
#include "strips.h"

namespace twofour {
namespace {

// Groups, activation, channels, height and width of the answer, then taps, stride, padding and dilation of both axes.
using Numbers13 = std::array<int64_t, 13>;

struct Image {
  int64_t channels, height, width;
};

Convolution convolution_of(const Numbers13& n, int64_t images, const Image& from, int threads, bool* damaged) {
  constexpr int64_t channels = 1 << 22, pixels = 1 << 30;  // the sizes of weights and lines stay below 2^63
  int64_t floats;
  for (const int64_t one : {n[0], n[2], from.channels})
    if (one < 1 || one > channels) throw std::invalid_argument("no such convolution");
  for (const int64_t one : {n[3], n[4], from.height, from.width})
    if (one < 1 || one > pixels) throw std::invalid_argument("no such convolution");
  if (from.channels % n[0] != 0 || n[2] % n[0] != 0 || __builtin_mul_overflow(n[2] * n[3], n[4], &floats) ||
      __builtin_mul_overflow(floats, 64 * (images + 1), &floats))
    throw std::invalid_argument("no such convolution");
  Convolution c{nullptr, nullptr, 0, nullptr, nullptr, nullptr, images, from.channels, n[2], n[0],
                axis({n[5], n[6], n[7], n[8]}, from.height, n[3]), axis({n[9], n[10], n[11], n[12]}, from.width, n[4]),
                conv_activation(n[1]), threads, nullptr, damaged};
  require_halo(c.height, c.width, c.in_channels);
  if (!all_meet(c.height)) throw std::invalid_argument("rows of the answer read no row of the image");
  return c;
}

}  // namespace

void bind_conv_chain(nb::module_& m) {
  // x and y: (images, channels, height, width) with channels densest; x may be contiguous where the first one takes planes.
  // `kernels`: places in `convolutions`; for each of them a
  // weight in its layout, a bias, a second operand, None or of its answer's shape, and the numbers above. `rows`: of y in a strip.
  bind_call(m, "conv_chain", +[](std::vector<ConvolutionAt> kernels, const Operand& x, const Operands& weights, const Operands& biases,
                                 const Operands& others, const Answer& y, std::vector<Numbers13> convs, int64_t rows,
                                 Threads threads) {
    static Scratch scratch;
    const size_t count = kernels.size();
    if (count == 0 || weights.size() != count || biases.size() != count || others.size() != count || convs.size() != count)
      throw std::invalid_argument("as many kernels, weights, biases, second operands and convolutions, at least one");
    if (rows < 1) throw std::invalid_argument("a strip has at least one row");
    const Border border("conv_chain");
    int64_t plane = 0;
    const View from = pixels(border, x, "input", {Type::f32}, &plane), to = pixels(border, y, "answer");
    border.require(from.shape[0] == to.shape[0], y, "answer", "as many images as the input");
    ConvChain chain;
    chain.rows = rows;
    std::vector<Numbers> shifts;  // copies of those whose numbers stand apart
    bool damaged = false;
    double between = 0;  // numbers of all answers: lines of each stand in one workspace
    Image image{from.shape[1], from.shape[2], from.shape[3]};
    for (size_t i = 0; i < count; i++) {
      const ConvolutionRow& kernel = convolution_at(kernels[i]);
      Convolution c = convolution_of(convs[i], from.shape[0], image, threads, &damaged);
      if (i == 0 && plane) {
        border.require(kernel.takes_planes(*kernel.row, c), x, "input", "a tensor in torch.channels_last");
        c.plane = plane;
      }
      image = {c.out_channels, c.height.output, c.width.output};
      between += double(from.shape[0]) * double(image.channels) * double(image.height) * double(image.width);
      if (between >= double(int64_t{1} << 40)) throw std::invalid_argument("no such convolutions: their answers exceed 4 TB");
      shifts.push_back(border.numbers(biases[i], "bias", c.out_channels));
      if (others[i].given()) {
        const View added = pixels(border, others[i], "second operand");
        const int64_t want[] = {from.shape[0], image.channels, image.height, image.width};
        border.require(std::equal(want, want + 4, added.shape), others[i], "second operand", "the answer's shape");
        c.other = floats(added);
      }
      kernel.read(border, *kernel.row, weights[i], &c);
      chain.kernels.push_back(&kernel);
      chain.convs.push_back(c);
    }
    for (size_t i = 0; i < count; i++) chain.convs[i].bias = shifts[i].data();
    border.require(image.channels == to.shape[1] && image.height == to.shape[2] && image.width == to.shape[3], y, "answer",
                   "the shape of the last convolution's");
    if (to.count() == 0) return;
    chain.convs.front().x = floats(from);
    chain.convs.back().y = floats(to);
    {
      const Unlocked unlocked;
      chain.plan();
      const Scratch::Lease lease(scratch, static_cast<size_t>(chain.bytes()));
      chain.run(static_cast<char*>(lease.data()));
    }
    if (damaged) border.damaged();
  });
}

}  // namespace twofour
