// The loops of a SIMD level, D3S_KERNELS_SIMD or the best of this machine, against double, at every length around the
// length of a vector. Buffers have exactly the needed size, so AddressSanitizer sees a read or write beyond them.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <random>
#include <vector>

#include "../../csrc/core/order_key.h"
#include "../../csrc/core/softmax_state.h"
#include "../../csrc/cpu/order_key_loops.h"
#include "../../csrc/cpu/ratio_loops.h"
#include "../../csrc/cpu/simd_level.h"
#include "../../csrc/cpu/softmax_rows.h"
#include "../../csrc/cpu/support_product_loops.h"
#include "../../csrc/cpu/wide_product.h"
#include "check.h"

using namespace d3s;

namespace {

template <class T>
std::unique_ptr<T[]> random_logits(int64_t n, float offset, std::mt19937& random, std::vector<double>& exact) {
  std::normal_distribution<float> normal;
  std::unique_ptr<T[]> logits(new T[n]);
  exact.resize(n);
  for (int64_t i = 0; i < n; ++i) {
    logits[i] = from_float<T>(random() % 10 == 0 ? -INFINITY : 4 * normal(random) + offset);
    exact[i] = to_float(logits[i]);
  }
  logits[random() % n] = from_float<T>(offset);
  for (int64_t i = 0; i < n; ++i) exact[i] = to_float(logits[i]);
  return logits;
}

template <class T>
void softmax_loops(const SoftmaxLoops<T>& loops, double rounding, std::mt19937& random) {
  for (int64_t n = 1; n <= kSlice; n = n < 200 ? n + 1 : n * 3 + 1) {
    const float temperature = n % 2 ? 1.f : 0.7f;
    std::vector<double> z;
    const auto logits = random_logits<T>(n, n % 3 ? 0.f : 100.f, random, z);
    const SoftmaxSums sums = loops.slice(logits.get(), n, kLog2E / temperature, logits.get());
    const double max = *std::max_element(z.begin(), z.end());
    double sum = 0, dot = 0;
    for (const double value : z) {
      const double e = std::exp((value - max) / temperature);
      sum += e;
      if (e > 0) dot += (value - max) * e;
    }
    CHECK(sums.max == max, "n %lld", static_cast<long long>(n));
    CHECK(std::fabs(sums.sum - sum) <= 2e-6 * sum, "n %lld: %g %g", static_cast<long long>(n), sums.sum + 0., sum);
    CHECK(std::fabs(sums.dot - dot) <= 2e-6 * std::fabs(dot) + 1e-30, "n %lld: %g %g", static_cast<long long>(n),
          sums.dot + 0., dot);

    const GradientRow row{static_cast<float>(max), kLog2E / temperature, 0.3f, -0.2f};
    std::unique_ptr<T[]> apart(new T[n]);
    loops.gradient(logits.get(), n, row, apart.get());
    loops.gradient(logits.get(), n, row, logits.get());  // in place
    for (int64_t i = 0; i < n; ++i) {
      const double e = std::exp((z[i] - max) / temperature);
      const double wanted = e > 0 ? e * (0.3 - 0.2 * (z[i] - max)) : 0.;
      CHECK(std::fabs(to_float(apart[i]) - wanted) <= rounding * std::fabs(wanted) + 1e-7, "n %lld, %lld",
            static_cast<long long>(n), static_cast<long long>(i));
      CHECK(to_float(apart[i]) == to_float(logits[i]), "in place differs at %lld", static_cast<long long>(i));
      if (std::isinf(z[i])) CHECK(to_float(apart[i]) == 0.f, "-inf has a gradient");
    }
  }
}

void key_loops(const OrderKeyLoops& loops, std::mt19937& random) {
  for (int64_t n = 1; n <= 3000; n = n < 100 ? n + 1 : n * 2) {
    std::unique_ptr<float[]> scores(new float[n]), advantages(new float[n]);
    std::unique_ptr<bool[]> mask(new bool[n]), marked(new bool[n]);
    std::unique_ptr<uint32_t[]> keys(new uint32_t[n]), copied(new uint32_t[n]);
    for (int64_t i = 0; i < n; ++i) {
      scores[i] = random() % 10 == 0 ? NAN : static_cast<float>(random() % 7);
      advantages[i] = static_cast<float>(random() % 5) - 2.f;
      mask[i] = random() % 4 != 0;
    }
    const int64_t present = loops.from_float32(scores.get(), advantages.get(), 0.f, mask.get(), n, keys.get());
    std::vector<uint32_t> wanted;
    for (int64_t i = 0; i < n; ++i)
      wanted.push_back(mask[i] ? order_key(std::fabs(advantages[i]) * scores[i]) : kAbsent);
    CHECK(std::equal(wanted.begin(), wanted.end(), keys.get()), "keys of %lld", static_cast<long long>(n));
    CHECK(present == n - std::count(wanted.begin(), wanted.end(), kAbsent), "present of %lld",
          static_cast<long long>(n));

    scores[n / 2] = n % 2 > 0 ? INFINITY : -INFINITY;
    int64_t finite = 0;
    const int64_t found = loops.finite_float32(scores.get(), n % 3 > 0 ? mask.get() : nullptr, n, copied.get());
    for (int64_t i = 0; i < n; ++i) {
      const bool usable = std::isfinite(scores[i]) && (n % 3 == 0 || mask[i]);
      finite += usable;
      CHECK(copied[i] == (usable ? order_key(scores[i]) : UINT32_MAX), "finite key %lld of %lld",
            static_cast<long long>(i), static_cast<long long>(n));
    }
    CHECK(found == finite, "finite keys of %lld", static_cast<long long>(n));

    const uint32_t low = order_key(2.f), high = order_key(6.f);
    const auto inside = [&](uint32_t key) { return key >= low && key <= high; };
    const auto at_least = [&](uint32_t key) { return key >= low; };
    CHECK(loops.count_from(keys.get(), n, low) == std::count_if(wanted.begin(), wanted.end(), at_least), "count");
    std::vector<uint32_t> between;
    std::copy_if(wanted.begin(), wanted.end(), std::back_inserter(between), inside);
    const int64_t count = loops.copy_between(keys.get(), n, low, high, copied.get());
    CHECK(count == static_cast<int64_t>(between.size()) && std::equal(between.begin(), between.end(), copied.get()),
          "copied of %lld", static_cast<long long>(n));
    loops.write_mask(keys.get(), n, low, marked.get());
    uint32_t lowest = UINT32_MAX;
    for (int64_t i = 0; i < n; ++i) {
      CHECK(marked[i] == at_least(wanted[i]), "mask of %lld at %lld", static_cast<long long>(n),
            static_cast<long long>(i));
      if (at_least(wanted[i])) lowest = std::min(lowest, wanted[i]);
    }
    CHECK(loops.lowest_from(keys.get(), n, low) == lowest, "lowest of %lld", static_cast<long long>(n));
  }
}

template <class T, class Make>
std::unique_ptr<T[]> array_of(int64_t n, const Make& make) {
  std::unique_ptr<T[]> values(new T[n]);
  for (int64_t i = 0; i < n; ++i) values[i] = make(i);
  return values;
}

// Ratios of n tokens, with and without a mask and groups. With `far`, one token is NaN or too large to be added.
void ratio_loops_of(const RatioLoops& loops, int64_t n, bool masked, bool grouped, bool far, std::mt19937& random) {
  std::normal_distribution<float> normal;
  const auto a = array_of<float>(n, [&](int64_t) { return normal(random); });
  const auto b = array_of<float>(n, [&](int64_t) { return normal(random); });
  if (far) a[random() % n] = random() % 2 ? NAN : 1e20f;
  const auto mask = array_of<bool>(n, [&](int64_t) { return random() % 4 != 0; });
  const auto ids = array_of<int8_t>(n, [&](int64_t) { return static_cast<int8_t>(random() % 4) - 1; });
  const TokenStretch tokens = {masked ? mask.get() : nullptr, grouped ? ids.get() : nullptr, n};
  const auto has = [&](int64_t i) { return (!masked || mask[i]) && (!grouped || ids[i] >= 0); };
  const auto in_group = [&](int64_t i, int group) { return has(i) && (!grouped || ids[i] == group); };

  const int groups = grouped ? 3 : 1;
  ExactSum of_differences[3], of_values[3];
  loops.sum(a.get(), b.get(), tokens, groups, of_differences);
  loops.sum(a.get(), nullptr, tokens, groups, of_values);
  for (int group = 0; group < groups; ++group) {
    ExactSum wanted, wanted_of_values;
    for (int64_t i = 0; i < n; ++i)
      if (in_group(i, group)) add_term(wanted, a[i] - b[i]), add_term(wanted_of_values, a[i]);
    const auto same = [](const ExactSum& x, const ExactSum& y) {
      return x.units == y.units && x.count == y.count && x.flags == y.flags;
    };
    CHECK(same(of_differences[group], wanted) && same(of_values[group], wanted_of_values), "sums of %lld",
          static_cast<long long>(n));
  }
  auto means = array_of<float>(n, [](int64_t) { return NAN; });
  const float numbers[3] = {0.25f, 0.5f, 0.75f};
  loops.assign(tokens, groups, numbers, 0.f, means.get());
  const LogBounds bounds = {-1.f, 2.f};
  const RatioLimits limits = limits_of(bounds);
  std::unique_ptr<float[]> plain(new float[n]), gradients(new float[n]), ratios(new float[n]);
  loops.exponentiate(a.get(), b.get(), tokens, nullptr, bounds, plain.get());
  std::copy_n(means.get(), n, ratios.get());
  loops.exponentiate(a.get(), b.get(), tokens, ratios.get(), bounds, ratios.get());  // in place of the means
  loops.gradients(a.get(), ratios.get(), tokens, limits, gradients.get());
  const auto equal = [](float x, float y) { return bits_of_float(x) == bits_of_float(y) || (x != x && y != y); };
  for (int64_t i = 0; i < n; ++i) {
    const float mean = has(i) ? 0.25f * static_cast<float>(grouped ? ids[i] + 1 : 1) : 0.f;
    const float ratio = has(i) ? bounded_ratio(mean + (a[i] - b[i]), bounds) : kNoRatio;
    CHECK(equal(means[i], mean), "mean %lld of %lld", static_cast<long long>(i), static_cast<long long>(n));
    CHECK(equal(plain[i], has(i) ? bounded_ratio(a[i] - b[i], bounds) : kNoRatio), "%lld", static_cast<long long>(i));
    CHECK(equal(ratios[i], ratio), "ratio %lld of %lld", static_cast<long long>(i), static_cast<long long>(n));
    CHECK(equal(gradients[i], has(i) ? ratio_gradient(a[i], ratio, limits) : 0.f), "%lld", static_cast<long long>(i));
  }
}

// `rounding` is that of T. Sums are in float32.
template <class T>
void support_product_loops(const SupportProductLoops<T>& loops, double rounding, std::mt19937& random) {
  std::normal_distribution<float> normal;
  const auto number = [&](int64_t) { return from_float<T>(normal(random)); };
  for (int64_t n = 1; n <= 9000; n = n < 200 ? n + 1 : n * 3 + 1) {
    const auto a = array_of<T>(n, number), b = array_of<T>(n, number);
    double product = 0, size = 0;
    for (int64_t i = 0; i < n; ++i) {
      const double term = 1. * to_float(a[i]) * to_float(b[i]);
      product += term, size += std::fabs(term);
    }
    CHECK(std::fabs(loops.dot(a.get(), b.get(), n) - product) <= 1e-6 * size, "dot of %lld", static_cast<long long>(n));

    auto sum = array_of<float>(n, [&](int64_t) { return normal(random); });
    const auto before = array_of<float>(n, [&](int64_t i) { return sum[i]; });
    const auto out = array_of<T>(n, [&](int64_t i) { return b[i]; });
    loops.add_scaled(a.get(), 0.3f, n, sum.get());
    loops.add_to(sum.get(), n, out.get());
    for (int64_t i = 0; i < n; ++i) {
      const float wanted = std::fma(to_float(a[i]), 0.3f, before[i]);
      const double total = 1. * to_float(b[i]) + wanted;
      CHECK(std::fabs(sum[i] - wanted) <= 1e-6 * (1 + std::fabs(wanted)), "%lld of %lld", static_cast<long long>(i),
            static_cast<long long>(n));
      CHECK(std::fabs(to_float(out[i]) - total) <= rounding * std::fabs(total) + 1e-6, "%lld of %lld",
            static_cast<long long>(i), static_cast<long long>(n));
    }
  }
}

void wide_products(const WideProduct& loops, int64_t rows, int64_t columns, int64_t inner, std::mt19937& random) {
  std::normal_distribution<float> normal;
  const auto number = [&](int64_t) { return from_float<bfloat16>(normal(random)); };
  const int64_t words = (inner + 1) / 2;
  const auto hidden = array_of<bfloat16>(rows * inner, number), weight = array_of<bfloat16>(columns * inner, number);
  const auto padded = array_of<uint32_t>(rows * words, [](int64_t) { return 0u; });
  for (int64_t r = 0; r < rows; ++r)
    memcpy(padded.get() + r * words, hidden.get() + r * inner, inner * sizeof(bfloat16));
  std::unique_ptr<uint32_t[]> panel(new uint32_t[loops.panel_words(inner)]);
  std::unique_ptr<float[]> out(new float[rows * columns]);
  loops.pack(weight.get(), inner, columns, inner, panel.get());
  loops.multiply(padded.get(), rows, panel.get(), inner, out.get(), columns, columns);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) {
      double product = 0, size = 0;
      for (int64_t i = 0; i < inner; ++i) {
        const double term = 1. * to_float(hidden[r * inner + i]) * to_float(weight[c * inner + i]);
        product += term, size += std::fabs(term);
      }
      CHECK(std::fabs(out[r * columns + c] - product) <= 1e-6 * size, "%lld, %lld of %lld x %lld x %lld",
            static_cast<long long>(r), static_cast<long long>(c), static_cast<long long>(rows),
            static_cast<long long>(columns), static_cast<long long>(inner));
    }
}

void wide_products(const WideProduct& loops, std::mt19937& random) {
  for (const int64_t inner : {1, 2, 3, 31, 32, 63, 200})
    for (const int64_t rows : {1, 7, 8, 9, 17})
      for (const int64_t columns : {int64_t{1}, loops.columns - 1, loops.columns})
        wide_products(loops, rows, columns, inner, random);
}

void level(const char* name, const SoftmaxRows& rows, const OrderKeyLoops& keys, const RatioLoops& ratios,
           const SupportProducts& products, const WideProduct& wide) {
  std::mt19937 random(std::random_device{}());
  wide_products(wide, random);
  std::printf("%s done\n", name);
  if (std::strstr(name, "_bf16")) return;  // the other loops are those of the level before it
  softmax_loops(rows.float32, 1e-6, random);
  softmax_loops(rows.bf16, 0x1p-8, random);
  softmax_loops(rows.fp16, 0x1p-10, random);
  key_loops(keys, random);
  support_product_loops(products.float32, 1e-6, random);
  support_product_loops(products.bf16, 0x1p-8, random);
  support_product_loops(products.fp16, 0x1p-10, random);
  for (int64_t n = 1; n <= 3000; n = n < 100 ? n + 1 : n * 2)
    for (int form = 0; form < 8; ++form) ratio_loops_of(ratios, n, form & 1, form & 2, form & 4, random);
}

}  // namespace

int main() {
  level(simd_level_name(simd_level()), softmax_rows(), order_key_loops(), ratio_loops(), support_products(),
        wide_product());
  return report("loops");
}
