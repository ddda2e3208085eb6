// How the threads of a block take turns. See cuda_shim.h.
//
// A thread that waits picks the next thread and switches to it directly. When a thread returns, the next thread that
// has not begun takes over its stack. So a block in which no thread waits runs as a loop on one stack.
#include "cuda_shim.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <mutex>
#include <numeric>
#include <string>
#include <unordered_map>

#if !defined(__x86_64__)
#define D3S_SHIM_UCONTEXT  // works everywhere, but each switch is a system call
#endif
#if defined(D3S_SHIM_UCONTEXT)
#include <ucontext.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#define D3S_SHIM_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define D3S_SHIM_ASAN 1
#endif
#endif
#if defined(D3S_SHIM_ASAN)
#include <sanitizer/common_interface_defs.h>
#endif

// A function that never returns must not use AddressSanitizer, which would mark its frame on a stack that is used
// again.
#define D3S_SHIM_NO_ASAN __attribute__((no_sanitize_address, noinline))

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace {

using d3s::shim::Operation;
using d3s::shim::Site;

// ---- stacks and switches between them ----------------------------------------------------------------------------

#if defined(D3S_SHIM_ASAN)
constexpr size_t kStackBytes = 256 << 10;
#else
constexpr size_t kStackBytes = 64 << 10;
#endif

struct Context {  // the saved state of a flow of control that is not running
#if defined(D3S_SHIM_UCONTEXT)
  ucontext_t registers;
#else
  void* stack_pointer = nullptr;
#endif
  const void* bottom = nullptr;  // the bottom of the stack; the last three members are for AddressSanitizer
  size_t bytes = 0;
  void* fake_stack = nullptr;
};

struct Stack {
  Context context;
  char* memory;
  char* top;
  Stack* next;  // in the list of unused stacks
};

Context launcher;                // the caller of run_grid
Context* left = nullptr;         // the context that ran before the latest switch
Stack* unused_stacks = nullptr;  // never freed

#if !defined(D3S_SHIM_UCONTEXT)
// Saves the registers that a callee has to preserve, and continues where `to` was saved.
extern "C" void d3s_shim_switch(void** from, void* to);
asm(R"(
  .text
  .local d3s_shim_switch
  .type d3s_shim_switch, @function
d3s_shim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  subq $8, %rsp
  stmxcsr (%rsp)
  fnstcw 4(%rsp)
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  ldmxcsr (%rsp)
  fldcw 4(%rsp)
  addq $8, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size d3s_shim_switch, . - d3s_shim_switch
)");
#endif

// Must be the first call after each switch, in the context that begins or continues.
D3S_SHIM_NO_ASAN void arrived(void* fake_stack) {
#if defined(D3S_SHIM_ASAN)
  __sanitizer_finish_switch_fiber(fake_stack, &left->bottom, &left->bytes);
#else
  static_cast<void>(fake_stack);
#endif
}

D3S_SHIM_NO_ASAN void switch_to(Context& from, Context& to, bool for_good = false) {
  left = &from;
#if defined(D3S_SHIM_ASAN)
  __sanitizer_start_switch_fiber(for_good ? nullptr : &from.fake_stack, to.bottom, to.bytes);
#else
  static_cast<void>(for_good);
#endif
#if defined(D3S_SHIM_UCONTEXT)
  swapcontext(&from.registers, &to.registers);
#else
  d3s_shim_switch(&from.stack_pointer, to.stack_pointer);
#endif
  arrived(from.fake_stack);
}

Stack* new_stack() {
  static size_t made = 0;
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* memory =
      mmap(nullptr, page + kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, page, PROT_NONE) != 0) {  // an overflow runs into this page
    std::perror("cuda_shim: no memory for a stack");
    std::abort();
  }
  auto* stack = new Stack();
  stack->memory = static_cast<char*>(memory) + page;
  // Without this offset the tops of all stacks would share a few cache lines.
  stack->top = stack->memory + kStackBytes - 64 * (made++ % 61);
  return stack;
}

// Takes a stack. The first switch to it starts `main`.
Stack* take_stack(void (*main)()) {
  Stack* const stack = unused_stacks ? unused_stacks : new_stack();
  unused_stacks = stack->next;
  Context& context = stack->context;
  context.bottom = stack->memory;
  context.bytes = kStackBytes;
#if defined(D3S_SHIM_UCONTEXT)
  getcontext(&context.registers);
  context.registers.uc_stack.ss_sp = stack->memory;
  context.registers.uc_stack.ss_size = static_cast<size_t>(stack->top - stack->memory);
  context.registers.uc_link = nullptr;
  makecontext(&context.registers, main, 0);
#else
  // The frame that d3s_shim_switch would leave: control words, six registers, the address to continue at, and no
  // caller.
  auto* frame = reinterpret_cast<uint64_t*>(stack->top) - 9;
  std::memset(frame, 0, 9 * sizeof *frame);
  auto* control = reinterpret_cast<char*>(frame);
  asm volatile("stmxcsr %0" : "=m"(*reinterpret_cast<uint32_t*>(control)));
  asm volatile("fnstcw %0" : "=m"(*reinterpret_cast<uint16_t*>(control + 4)));
  frame[7] = reinterpret_cast<uint64_t>(main);
  context.stack_pointer = frame;
#endif
  return stack;
}

// ---- the running launch and block --------------------------------------------------------------------------------

constexpr unsigned kMaxThreads = 1024;
constexpr uint64_t kPoison = 0xa5a5a5a5a5a5a5a5u;  // marks memory that is not written

struct Thread {
  Operation operation;
  unsigned mask;
  unsigned source;
  Site at;
  uint64_t value, result;
};

struct Warp {  // each member is a set of lanes, as bits
  unsigned lanes, ready, at_warp_operation, at_barrier, returned;
};

struct Launch {
  uint64_t number = 0;
  size_t shared_bytes = 0;
  void (*thread)(void*) = nullptr;
  void* arguments = nullptr;
} launch;

struct Block {
  Stack* stacks[kMaxThreads];  // the stack of each thread; null before it begins and after it returns
  Thread threads[kMaxThreads];
  Warp warps[kMaxThreads / 32];
  unsigned size;         // threads
  unsigned warps_ready;  // a bit for each warp: whether it has a lane that is ready
  unsigned warp;         // the warp that was picked last
  bool one_warp_ahead;   // run the same warp until it has to wait, instead of drawing another one
  unsigned running;      // the index of the running thread
  unsigned at_barrier, barrier_sum, barrier_result;
  unsigned returned;
  void* shared;
} block;

struct Random {  // splitmix64
  uint64_t state;
  uint64_t next() {
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }
  unsigned bit_of(unsigned set) {  // the position of a random set bit, almost uniform
    const auto turn = static_cast<unsigned>(next() >> 59);
    const unsigned turned = set >> turn | set << (-turn & 31);
    return (static_cast<unsigned>(__builtin_ctz(turned)) + turn) & 31;
  }
} draw;

std::mutex one_launch_at_a_time;
thread_local cudaError_t last_error = cudaSuccess;
std::unordered_map<const void*, size_t>& allowed_shared_bytes() {
  static std::unordered_map<const void*, size_t> bytes;
  return bytes;
}

uint64_t setting(const char* name, uint64_t otherwise) {
  const char* value = std::getenv(name);
  return value && *value ? std::strtoull(value, nullptr, 0) : otherwise;
}

size_t device_shared_bytes() { return setting("D3S_SHIM_SHARED", 227 << 10); }

// ---- errors ------------------------------------------------------------------------------------------------------

const char* name_of(Operation operation) {
  static const char* const names[] = {
      "__syncthreads", "__syncthreads_or", "__syncthreads_and", "__syncthreads_count", "__syncwarp",
      "__shfl_sync",   "__shfl_up_sync",   "__shfl_down_sync",  "__shfl_xor_sync",     "__ballot_sync",
      "__any_sync",    "__all_sync",       "__reduce_add_sync", "__reduce_min_sync",   "__reduce_max_sync"};
  return names[static_cast<int>(operation)];
}

std::string text_of(Operation operation, unsigned mask, Site at) {
  char text[512];
  if (operation <= Operation::kSyncthreadsCount)
    std::snprintf(text, sizeof text, "%s (%s:%d)", name_of(operation), at.file, at.line);
  else
    std::snprintf(text, sizeof text, "%s, mask %08x (%s:%d)", name_of(operation), mask, at.file, at.line);
  return text;
}

std::string text_of(unsigned index) {
  const Thread& thread = block.threads[index];
  const Warp& warp = block.warps[index / 32];
  const unsigned bit = 1u << index % 32;
  if (warp.returned & bit) return "returned";
  if ((warp.at_warp_operation | warp.at_barrier) & bit)
    return "wait at " + text_of(thread.operation, thread.mask, thread.at);
  return warp.ready & bit ? "could go on" : "running";
}

[[noreturn]] void stop(const std::string& reason) {
  std::fprintf(stderr, "cuda_shim: kernel launch %llu, grid (%u, %u), block (%u, %u), %u threads: %s\n",
               static_cast<unsigned long long>(launch.number), gridDim.x, gridDim.y, blockIdx.x, blockIdx.y, block.size,
               reason.c_str());
  for (unsigned begin = 0, end; begin < block.size; begin = end) {
    const std::string text = text_of(begin);
    for (end = begin + 1; end < block.size && text_of(end) == text;) ++end;
    std::fprintf(stderr, "  threads %u to %u: %s\n", begin, end - 1, text.c_str());
  }
  std::fflush(stderr);
  std::abort();
}

[[noreturn]] void stop_at(Operation operation, unsigned mask, Site at, const std::string& reason) {
  stop("thread " + std::to_string(block.running) + " at " + text_of(operation, mask, at) + ": " + reason);
}

// ---- scheduling --------------------------------------------------------------------------------------------------

void make_ready(unsigned warp, unsigned lanes) {
  block.warps[warp].ready |= lanes;
  block.warps_ready |= 1u << warp;
}

// Picks one of the threads that can run. Returns false if all threads have returned.
bool pick_next() {
  if (block.warps_ready == 0) {
    if (block.returned == block.size) return false;
    stop("deadlock");
  }
  if (!block.one_warp_ahead || !(block.warps_ready >> block.warp & 1)) block.warp = draw.bit_of(block.warps_ready);
  Warp& warp = block.warps[block.warp];
  const unsigned lane = draw.bit_of(warp.ready);
  warp.ready &= ~(1u << lane);
  if (warp.ready == 0) block.warps_ready &= ~(1u << block.warp);
  block.running = threadIdx.x = block.warp * 32 + lane;
  return true;
}

// Some missing barriers show only if warps keep pace, others only if one warp runs far ahead.
void draw_pace() { block.one_warp_ahead = draw.next() >> 63; }

void thread_returned() {
  const unsigned index = block.running, bit = 1u << index % 32;
  Warp& warp = block.warps[index / 32];
  warp.returned |= bit;
  ++block.returned;
  if (block.at_barrier) stop("thread " + std::to_string(index) + " returned, but others wait for it at a barrier");
  for (unsigned rest = warp.at_warp_operation; rest; rest &= rest - 1) {
    const unsigned other = index / 32 * 32 + static_cast<unsigned>(__builtin_ctz(rest));
    if (block.threads[other].mask & bit)
      stop("thread " + std::to_string(index) + " returned, but thread " + std::to_string(other) + " waits for it");
  }
}

D3S_SHIM_NO_ASAN void run_threads() {
  arrived(nullptr);
  for (Stack* stack = block.stacks[block.running];;) {
    launch.thread(launch.arguments);
    thread_returned();
    block.stacks[block.running] = nullptr;
    Context* next = &launcher;
    if (pick_next()) {
      Stack*& its = block.stacks[block.running];
      if (!its) {
        its = stack;
        continue;
      }
      next = &its->context;
    }
    stack->next = unused_stacks;
    unused_stacks = stack;  // no other thread takes it before the switch
    switch_to(stack->context, *next, true);
  }
}

// Runs other threads until the running thread is picked again. The running thread waits, or is ready.
void wait_for_turn() {
  Stack* const stack = block.stacks[block.running];
  pick_next();
  Stack*& next = block.stacks[block.running];
  if (next == stack) return;
  if (!next) next = take_stack(run_threads);
  switch_to(stack->context, next->context);
}

void run_block(const dim3& grid, uint64_t index) {
  blockIdx = {static_cast<unsigned>(index % grid.x), static_cast<unsigned>(index / grid.x), 0};
  // Memory of exactly the requested size is allocated for each block, so that AddressSanitizer sees accesses beyond its
  // end or lifetime.
  block.shared = launch.shared_bytes ? std::malloc(launch.shared_bytes) : nullptr;
  if (block.shared) std::memset(block.shared, static_cast<int>(kPoison & 0xff), launch.shared_bytes);
  block.at_barrier = block.barrier_sum = block.returned = block.warps_ready = 0;
  for (unsigned warp = 0; warp * 32 < block.size; ++warp) {
    const unsigned count = block.size - warp * 32;
    block.warps[warp] = {};
    block.warps[warp].lanes = count < 32 ? (1u << count) - 1 : 0xffffffffu;
    make_ready(warp, block.warps[warp].lanes);
  }
  draw_pace();
  pick_next();
  Stack* const stack = block.stacks[block.running] = take_stack(run_threads);
  switch_to(launcher, stack->context);
  std::free(block.shared);
}

// ---- operations --------------------------------------------------------------------------------------------------

// Gives each lane of `group` its result. All of these lanes wait.
void finish_warp_operation(Operation operation, Thread* lanes, unsigned group) {
  if (Operation::kShuffle <= operation && operation <= Operation::kShuffleXor) {
    for (unsigned rest = group; rest; rest &= rest - 1) {
      Thread& thread = lanes[__builtin_ctz(rest)];  // the value of a lane outside the group is undefined
      thread.result = group >> thread.source & 1 ? lanes[thread.source].value : kPoison;
    }
    return;
  }
  unsigned votes = 0, sum = 0, least = ~0u, most = 0;
  for (unsigned rest = group; rest; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    const auto value = static_cast<unsigned>(lanes[lane].value);
    votes |= (value != 0 ? 1u : 0u) << lane;
    sum += value;
    least = min(least, value);
    most = max(most, value);
  }
  const unsigned result = operation == Operation::kBallot      ? votes
                          : operation == Operation::kAny       ? votes != 0
                          : operation == Operation::kAll       ? votes == group
                          : operation == Operation::kReduceAdd ? sum
                          : operation == Operation::kReduceMin ? least
                                                               : most;
  for (unsigned rest = group; rest; rest &= rest - 1) lanes[__builtin_ctz(rest)].result = result;
}

}  // namespace

namespace d3s::shim {

void* shared_memory() { return block.shared; }

int block_operation(Operation operation, bool predicate, Site at) {
  const unsigned index = block.running;
  if (block.returned) stop_at(operation, 0, at, "other threads of the block have returned");
  Thread& thread = block.threads[index];
  thread.operation = operation;
  thread.at = at;
  block.warps[index / 32].at_barrier |= 1u << index % 32;
  block.barrier_sum += predicate;
  if (++block.at_barrier == block.size) {
    for (unsigned i = 0; i < block.size; ++i)
      if (block.threads[i].operation != operation || block.threads[i].at.line != at.line)
        stop("the threads are at different barriers");
    for (unsigned warp = 0; warp * 32 < block.size; ++warp) {
      block.warps[warp].at_barrier = 0;
      make_ready(warp, block.warps[warp].lanes);
    }
    block.barrier_result = operation == Operation::kSyncthreadsCount ? block.barrier_sum
                           : operation == Operation::kSyncthreadsAnd ? block.barrier_sum == block.size
                                                                     : block.barrier_sum != 0;
    block.at_barrier = block.barrier_sum = 0;
    draw_pace();
  }
  wait_for_turn();
  return static_cast<int>(block.barrier_result);  // the next barrier cannot complete before this thread arrives
}

uint64_t warp_operation(Operation operation, unsigned mask, uint64_t value, Site at, unsigned source) {
  const unsigned index = block.running, lane = index % 32;
  Warp& warp = block.warps[index / 32];
  Thread* const lanes = &block.threads[index / 32 * 32];
  Thread& thread = block.threads[index];
  if (!(mask >> lane & 1)) stop_at(operation, mask, at, "the mask lacks the thread itself");
  if (mask & warp.returned) stop_at(operation, mask, at, "the mask has lanes that have returned");
  thread.operation = operation;
  thread.mask = mask;
  thread.source = source;
  thread.at = at;
  thread.value = value;
  warp.at_warp_operation |= 1u << lane;

  const unsigned group = mask & warp.lanes;
  bool complete = (warp.at_warp_operation & group) == group;
  for (unsigned rest = complete ? group : 0; rest; rest &= rest - 1) {
    const Thread& other = lanes[__builtin_ctz(rest)];
    complete &= other.operation == operation && other.mask == mask;
  }
  if (complete) {
    if (operation != Operation::kSyncwarp) finish_warp_operation(operation, lanes, group);
    warp.at_warp_operation &= ~group;
    make_ready(index / 32, group);
  }
  wait_for_turn();
  return thread.result;
}

// Works like PTX's shfl: five bits of the operand count, and a lane whose source is outside its segment gets its own
// value.
unsigned source_lane(Operation operation, unsigned operand, int width, Site at) {
  if (width < 1 || width > 32 || (width & (width - 1)))
    stop_at(operation, 0, at, "width " + std::to_string(width) + " is no power of two up to 32");
  const unsigned lane = block.running % 32, offset = operand & 31;
  const unsigned first = lane & ~static_cast<unsigned>(width - 1), last = first + static_cast<unsigned>(width) - 1;
  switch (operation) {
    case Operation::kShuffleUp:
      return lane >= first + offset ? lane - offset : lane;
    case Operation::kShuffleDown:
      return lane + offset <= last ? lane + offset : lane;
    case Operation::kShuffleXor:
      return (lane ^ offset) <= last ? lane ^ offset : lane;
    default:
      return first + (offset & static_cast<unsigned>(width - 1));
  }
}

void run_grid(const void* kernel, dim3 grid, int threads, size_t shared_bytes, void (*thread)(void*), void* arguments) {
  const std::lock_guard<std::mutex> alone(one_launch_at_a_time);
  if (threads < 1 || threads > static_cast<int>(kMaxThreads) || grid.x < 1 || grid.x > 0x7fffffffu || grid.y < 1 ||
      grid.y > 65535 || grid.z != 1) {
    last_error = cudaErrorInvalidConfiguration;
    return;
  }
  const auto allowed = allowed_shared_bytes().find(kernel);
  if (shared_bytes > device_shared_bytes() ||
      shared_bytes > (allowed == allowed_shared_bytes().end() ? 48 << 10 : allowed->second)) {
    last_error = cudaErrorInvalidValue;
    return;
  }
  launch.number = ++d3s_shim_counts.launches;
  launch.shared_bytes = shared_bytes;
  launch.thread = thread;
  launch.arguments = arguments;
  gridDim = grid;
  blockDim = dim3(static_cast<unsigned>(threads));
  threadIdx = {};
  block.size = static_cast<unsigned>(threads);
  block.warp = 0;

  if (setting("D3S_SHIM_DRY", 0) > 0) return;

  // Every block runs once. The first block is random; the others follow in steps that are coprime to the number of
  // blocks.
  const uint64_t seed = setting("D3S_SHIM_SEED", 0), blocks = static_cast<uint64_t>(grid.x) * grid.y;
  draw.state = seed;
  draw.state = draw.next();  // so that the sequences of neighbouring seeds do not overlap
  uint64_t index = draw.next() % blocks, step;
  do step = draw.next() % blocks;
  while (std::gcd(step, blocks) != 1);
  for (uint64_t done = 0; done < blocks; ++done) {
    run_block(grid, index);
    index = (index + step) % blocks;
  }
}

cudaError_t allow_shared_memory(const void* kernel, int bytes) {
  const std::lock_guard<std::mutex> alone(one_launch_at_a_time);
  if (bytes < 0 || static_cast<size_t>(bytes) > device_shared_bytes()) return last_error = cudaErrorInvalidValue;
  allowed_shared_bytes()[kernel] = static_cast<size_t>(bytes);
  return cudaSuccess;
}

Counts d3s_shim_counts{};

namespace {
std::string launches;
}

void note_launch(const char* name, int64_t blocks, int threads, size_t shared_bytes) {
  const std::lock_guard<std::mutex> alone(one_launch_at_a_time);
  if (launches.size() > 1 << 20) launches.clear();  // nobody reads them
  launches += std::string(name) + "\t" + std::to_string(blocks) + "\t" + std::to_string(threads) + "\t" +
              std::to_string(shared_bytes) + "\n";
}

const char* d3s_shim_launches() {
  static std::string told;
  const std::lock_guard<std::mutex> alone(one_launch_at_a_time);
  told = std::exchange(launches, {});
  return told.c_str();
}

}  // namespace d3s::shim

// ---- the runtime -------------------------------------------------------------------------------------------------

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t) {
  ++d3s::shim::d3s_shim_counts.memsets;
  d3s::shim::note_launch("memset", 0, 0, 0);
  std::memset(at, value, bytes);
  return cudaSuccess;
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
  }
  return "unrecognized error code";
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = static_cast<int>(attribute == cudaDevAttrMultiProcessorCount ? setting("D3S_SHIM_SMS", 4)
                                                                        : device_shared_bytes());
  return cudaSuccess;
}
