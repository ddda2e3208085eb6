// csrc/core: the arithmetic that CPU and CUDA kernels share.
#include <cmath>
#include <random>
#include <vector>

#include "../../csrc/core/exact_sum.h"
#include "../../csrc/core/exponential.h"
#include "../../csrc/core/float_bits.h"
#include "../../csrc/core/order_key.h"
#include "../../csrc/core/quota.h"
#include "../../csrc/core/softmax_state.h"
#include "../../csrc/core/split_scan.h"
#include "check.h"

using namespace d3s;

namespace {

void every_half_survives_the_way_through_float() {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float16 half{static_cast<uint16_t>(bits)};
    const bfloat16 brain{static_cast<uint16_t>(bits)};
    const float h = to_float(half), b = to_float(brain);
    if (h == h)
      CHECK(from_float<float16>(h).bits == bits, "float16 %x", bits);
    else
      CHECK(std::isnan(to_float(from_float<float16>(h))), "float16 NaN %x", bits);
    if (b == b)
      CHECK(from_float<bfloat16>(b).bits == bits, "bfloat16 %x", bits);
    else
      CHECK(std::isnan(to_float(from_float<bfloat16>(b))), "bfloat16 NaN %x", bits);
  }
}

void floats_round_to_the_nearest_half(std::mt19937& random) {
  std::uniform_int_distribution<uint32_t> any;
  for (int i = 0; i < 1000000; ++i) {
    const float value = float_of_bits(any(random));
    if (value != value) continue;
    const uint16_t bits = from_float<float16>(value).bits;
    const double error = std::fabs(static_cast<double>(value) - to_float(float16{bits}));
    if (std::fabs(value) < 65504.f && (bits & 0x7fff) != 0) {
      const double below = std::fabs(value - static_cast<double>(to_float(float16{static_cast<uint16_t>(bits - 1)})));
      CHECK(error <= below, "%.9g became %x", static_cast<double>(value), bits);
      if (error == below) CHECK((bits & 1) == 0, "a tie went to the odd %x", bits);
    }
  }
}

void keys_order_as_floats_do(std::mt19937& random) {
  std::uniform_int_distribution<uint32_t> any;
  for (int i = 0; i < 1000000; ++i) {
    const float a = float_of_bits(any(random)), b = float_of_bits(any(random));
    const uint32_t key_a = order_key(a), key_b = order_key(b);
    if (a != a) {
      CHECK(key_a == kAbsent, "NaN has key %x", key_a);
      continue;
    }
    CHECK(key_a != kAbsent && key_a <= kLargestKey, "%g has key %x", static_cast<double>(a), key_a);
    CHECK(order_key_value(key_a) == a, "%g", static_cast<double>(a));
    if (b == b) CHECK((a < b) == (key_a < key_b), "%g %g", static_cast<double>(a), static_cast<double>(b));
  }
  CHECK(order_key(-0.f) == order_key(0.f) && order_key(0.f) == kZeroKey, "zeros differ");
  CHECK(order_key(INFINITY) == kLargestKey, "%x", order_key(INFINITY));
}

void keep_counts() {
  CHECK(keep_from_ratio(0.07, 100, kDoubleSlack) == 7, "0.07 of 100");
  CHECK(keep_from_ratio(0.07f, 100, kFloatSlack) == 7, "0.07f of 100");
  CHECK(keep_from_ratio(0.071, 100, kDoubleSlack) == 8, "0.071 of 100");
  CHECK(keep_from_ratio(1e-9, 100, kDoubleSlack) == 1, "at least one");
  CHECK(keep_from_ratio(1.0, 100, kDoubleSlack) == 100, "all");
  CHECK(keep_from_ratio(0.5, 0, kDoubleSlack) == 0, "none of none");
  CHECK(keep_from_ratio(1.0, (int64_t{1} << 40) + 1, kDoubleSlack) == (int64_t{1} << 40) + 1, "all of many");
}

void exponentials_are_good_to_a_rounding_step(std::mt19937& random) {
  std::uniform_real_distribution<float> wide(-103.f, 88.7f), near(-0.01f, 0.01f);
  for (int i = 0; i < 1000000; ++i) {
    const float x = i % 2 ? wide(random) : near(random);
    const double exact = std::exp(static_cast<double>(x));
    const double step = std::nextafter(static_cast<float>(exact), INFINITY) - static_cast<float>(exact);
    CHECK(std::fabs(exponential(x) - exact) <= step, "e^%.9g", static_cast<double>(x));
  }
  CHECK(exponential(0.f) == 1.f && exponential(-0.f) == 1.f, "e^0");
  CHECK(exponential(-INFINITY) == 0.f && exponential(INFINITY) == INFINITY, "e^infinity");
  CHECK(std::isnan(exponential(NAN)), "e^NaN");
}

void sums_do_not_depend_on_their_order(std::mt19937& random) {
  std::uniform_real_distribution<float> term(-4095.f, 4095.f);
  std::vector<float> terms(1000);
  double exact = 0;
  for (float& t : terms) {
    t = term(random) * std::exp2(-static_cast<float>(random() % 30));
    exact += t;
  }
  ExactSum forwards, backwards;
  for (size_t i = 0; i < terms.size(); ++i) {
    add_term(forwards, terms[i]);
    add_term(backwards, terms[terms.size() - 1 - i]);
  }
  CHECK(forwards.units == backwards.units && forwards.count == 1000, "%lld units",
        static_cast<long long>(forwards.units));
  CHECK(std::fabs(mean_of(forwards) - exact / 1000) <= 1e-7 * std::fabs(exact) / 1000 + 0x1p-27, "mean");
  ExactSum largest;
  for (int i = 0; i < 1 << 25; ++i) add_term(largest, std::nextafter(kFarTerm, 0.f));
  CHECK(mean_of(largest) == std::nextafter(kFarTerm, 0.f), "2^25 of the largest terms: %g", mean_of(largest) + 0.);
}

SoftmaxState state_of(const std::vector<float>& z, size_t begin, size_t end) {
  SoftmaxState state;
  for (size_t i = begin; i < end; ++i) state = merge(state, {z[i], 1.f, 0.f}, 1.f);
  return state;
}

void states_merge_in_any_grouping(std::mt19937& random) {
  std::normal_distribution<float> normal;
  for (int round = 0; round < 2000; ++round) {
    const size_t n = 1 + random() % 40, cut = random() % (n + 1);
    const float offset = round % 3 == 0 ? 0.f : round % 3 == 1 ? 1000.f : -1e6f;
    std::vector<float> z(n);
    for (float& value : z) value = 4 * normal(random) + offset;
    const RowStatistics whole = finish(state_of(z, 0, n), 1.f);
    const RowStatistics parts = finish(merge(state_of(z, 0, cut), state_of(z, cut, n), 1.f), 1.f);
    double max = -INFINITY, sum = 0, dot = 0;
    for (const float value : z) max = std::fmax(max, value);
    for (const float value : z) sum += std::exp(value - max), dot += (value - max) * std::exp(value - max);
    const double entropy = std::log(sum) - dot / sum;
    CHECK(std::fabs(whole.entropy - entropy) < 3e-6, "%g %g", static_cast<double>(whole.entropy), entropy);
    CHECK(std::fabs(parts.entropy - entropy) < 3e-6, "%g %g", static_cast<double>(parts.entropy), entropy);
    CHECK(std::fabs(parts.log_sum - std::log(sum)) < 3e-6, "%g", static_cast<double>(parts.log_sum));
  }
}

void states_of_special_values() {
  const SoftmaxState nothing, nan{1.f, NAN, NAN}, plain{2.f, 1.f, 0.f}, far{3e38f, 1.f, 0.f}, low{-3e38f, 1.f, 0.f};
  CHECK(std::isnan(finish(nothing, 1.f).entropy), "an empty row");
  CHECK(std::isnan(finish(merge(nan, far, 1.f), 1.f).entropy), "NaN far below the maximum is lost");
  CHECK(std::isnan(finish(merge(far, nan, 1.f), 1.f).entropy), "NaN far below the maximum is lost");
  CHECK(finish(merge(nothing, plain, 1.f), 1.f).entropy == 0.f, "one logit");
  CHECK(finish(merge(far, low, 1.f), 1.f).entropy == 0.f, "6e38 apart");
  CHECK(finish(merge(low, far, 0.1f), 10.f).entropy == 0.f, "6e38 apart, hot");
}

}  // namespace

int main() {
  std::mt19937 random(std::random_device{}());
  every_half_survives_the_way_through_float();
  floats_round_to_the_nearest_half(random);
  keys_order_as_floats_do(random);
  keep_counts();
  exponentials_are_good_to_a_rounding_step(random);
  sums_do_not_depend_on_their_order(random);
  states_merge_in_any_grouping(random);
  states_of_special_values();
  return report("core");
}
