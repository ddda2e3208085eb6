// A minimal test harness that says which check failed, and with which numbers.
#pragma once

#include <cstdio>
#include <cstdlib>

inline int failures = 0;

#define CHECK(condition, ...)                                     \
  do {                                                            \
    if (!(condition)) {                                           \
      std::printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      std::printf(__VA_ARGS__);                                   \
      std::printf("\n");                                          \
      if (++failures == 20) std::exit(1);                         \
    }                                                             \
  } while (false)

inline int report(const char* name) {
  std::printf("%s: %s\n", name, failures ? "FAILED" : "passed");
  return failures ? 1 : 0;
}
