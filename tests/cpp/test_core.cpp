// csrc/core: what the tests of the ops do not see of the arithmetic that CPU and CUDA kernels share: every number of
// half precision, keys of any floats, and counts and sums that are too large for a test.
#include <cmath>
#include <random>

#include "../../csrc/core/exact_sum.h"
#include "../../csrc/core/float_bits.h"
#include "../../csrc/core/order_key.h"
#include "../../csrc/core/quota.h"
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

void sums_hold_the_most_terms_of_the_largest_size() {
  ExactSum largest;
  for (int i = 0; i < 1 << 25; ++i) add_term(largest, std::nextafter(kFarTerm, 0.f));
  CHECK(mean_of(largest) == std::nextafter(kFarTerm, 0.f), "2^25 of the largest terms: %g", mean_of(largest) + 0.);
}

}  // namespace

int main() {
  std::mt19937 random(std::random_device{}());
  every_half_survives_the_way_through_float();
  floats_round_to_the_nearest_half(random);
  keys_order_as_floats_do(random);
  keep_counts();
  sums_hold_the_most_terms_of_the_largest_size();
  return report("core");
}
