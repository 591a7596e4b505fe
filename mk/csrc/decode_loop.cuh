// The decode loop: a thread that launches steps back to back, reads what they sample and hands it to one reader.
//
// It is parked between runs, and parks itself where the next step could take a row further than it may go. In flight
// are never more than `ahead` steps; what they sample is always read and handed on, so nothing is decoded twice. Every
// wait for the card is bounded. Plain C++: a `Card` launches, so tests drive the loop without one.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "host_step.cuh"

// Why a loop is parked, in order of precedence; mk/decode_loop.py has the same.
enum Parked : int {
  RUNNING,
  LOST,      // the card neither ends a step in time nor says why, or is in error: `code`
  ABORTED,   // all that was queued is over, and a step has sampled nothing
  REFUSED,   // a launch: `code`
  FAULT,     // a row has a status
  END,       // a row came to one of its end tokens
  ASKED,     // somebody called park
  STEPS,     // as many as the run may have
  BUDGET,    // a row has all its tokens
  ROOM,      // a row's next context would exceed the pages that it holds
  CROWDED,   // never parked for: the reader has to make room first
};

// A run: rows that decode together from where their pages end. `first` numbers its first launch.
struct LoopRun {
  uint64_t first, steps;      // steps: at most
  int32_t rows;
  int32_t keys[MAX_ROWS];     // contexts of the first step, its token included; 0: inactive row
  int32_t held[MAX_ROWS];     // contexts that the row's pages cover
  int32_t budget[MAX_ROWS];   // tokens the row may yet get
  int32_t ends_at[MAX_ROWS + 1];
  const int32_t* ends;        // those of row r, ascending: ends[ends_at[r]] .. ends[ends_at[r + 1]]
};

// What a step sampled. A row that is inactive, has ended or got no token has -1.
struct StepRecord {
  uint64_t number;
  int64_t started_ns;  // by the card's clock since the first launch of all; -1: unknown
  int32_t tokens[MAX_ROWS], status[MAX_ROWS];
};

// launches: of the run. code: the card's error, where that is why it is parked.
struct LoopState {
  uint64_t launches;
  int32_t parked, code;
};

class Card {
 public:
  enum State : int { IDLE = 0, BUSY = -1 };
  virtual ~Card() = default;
  virtual void load(const void* params) = 0;  // what launches pass on; while nothing is in flight
  // The rest is called by the loop's thread alone.
  virtual void attach() = 0;                  // before all else
  virtual int launch(uint64_t number) = 0;    // queues a step; 0 or an error code
  virtual int state() = 0;                    // of what is queued: IDLE when all of it is over, BUSY, or an error code
  virtual int64_t started_ns() = 0;           // of each launch in turn, once it has sampled
};

class DecodeLoop {
 public:
  // ring: `slots` records that launch n % slots writes to. capacity: records that the reader may be behind.
  DecodeLoop(std::unique_ptr<Card> card, const HostStep* ring, uint64_t slots, uint64_t ahead, uint64_t capacity,
             std::chrono::nanoseconds limit)
      : card_(std::move(card)), ring_(ring), slots_(slots), ahead_(std::min({ahead, slots, capacity})), limit_(limit),
        records_(capacity), thread_([this] { serve(); }) {}

  ~DecodeLoop() {
    end(std::chrono::hours(24));
    thread_.join();
  }

  // Parks, and ends the thread. False where it has not ended in `patience`, since a call to the card does not return:
  // then this object and all that the card may write to have to stay.
  bool end(std::chrono::nanoseconds patience) {
    std::unique_lock<std::mutex> lock(mutex_);
    stopping_ = asked_ = true;
    wake_.notify_all();
    return readable_.wait_for(lock, patience, [this] { return ended_; });
  }

  // False while another run is not parked.
  bool resume(const void* params, const LoopRun& run) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (parked_ == RUNNING) return false;
    card_->load(params);
    run_ = run;
    ends_.assign(run.ends, run.ends + run.ends_at[run.rows]);
    for (int row = 0; row < MAX_ROWS; ++row) {
      live_[row] = row < run.rows && run.keys[row] > 0;
      held_[row] = run.held[row];
    }
    seen_ = next_ = run.first;
    asked_ = false, settled_ = RUNNING, code_ = 0;
    parked_ = RUNNING;
    wake_.notify_all();
    return true;
  }

  // Asks for a park at the next step that has not been launched.
  void park() {
    std::lock_guard<std::mutex> lock(mutex_);
    asked_ = true;
    wake_.notify_all();
  }

  // The row's pages cover contexts of `keys` from the next launch on: their table entries are on the card's way.
  void grant(int row, int keys) { held_[row] = keys; }

  // Up to `room` records, in order; waits for one. 0: parked, and all has been read; -1: nothing came in `patience`.
  // For one thread.
  int read(StepRecord* out, int room, std::chrono::nanoseconds patience) {
    if (const int count = take(out, room)) return count;
    if (parked_ != RUNNING) return take(out, room);  // what was handed on just before
    std::unique_lock<std::mutex> lock(mutex_);
    reader_waits_ = true;
    readable_.wait_for(lock, patience, [this] { return head_ != tail_ || parked_ != RUNNING; });
    reader_waits_ = false;
    const bool parked = parked_ != RUNNING;  // and then all has been handed on
    lock.unlock();
    const int count = take(out, room);
    return count || parked ? count : -1;
  }

  // Of the last run, once it is parked.
  LoopState state() const {
    const int parked = parked_;
    return parked == RUNNING ? LoopState{0, parked, 0} : LoopState{next_ - run_.first, parked, code_};
  }

 private:
  using Clock = std::chrono::steady_clock;

  void serve() {
    card_->attach();
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return stopping_ || parked_ == RUNNING; });
      if (parked_ != RUNNING) {
        ended_ = true;
        readable_.notify_all();
        return;
      }
      lock.unlock();
      const Parked why = decode();
      lock.lock();
      parked_ = why;
      readable_.notify_all();
    }
  }

  Parked decode() {
    for (;;) {
      Parked obstacle = next_obstacle();
      for (; obstacle == RUNNING && next_ - seen_ < ahead_; obstacle = next_obstacle())
        if ((code_ = card_->launch(next_)))
          settle(REFUSED);
        else
          ++next_;
      if (seen_ < next_) {
        const Parked failure = await_step();
        if (failure != RUNNING) return failure;
        hand_on();
      } else if (obstacle == CROWDED) {
        await_reader();
      } else {
        return obstacle;
      }
    }
  }

  // What keeps the next step from being launched.
  Parked next_obstacle() const {
    if (settled_ != RUNNING) return settled_;
    if (asked_) return ASKED;
    if (next_ - run_.first >= run_.steps) return STEPS;
    const auto done = static_cast<int64_t>(next_ - run_.first);
    Parked found = RUNNING;
    for (int row = 0; row < MAX_ROWS; ++row) {
      if (!live_[row]) continue;
      if (done >= run_.budget[row]) return BUDGET;
      if (run_.keys[row] + done > held_[row]) found = ROOM;
    }
    if (found == RUNNING && tail_ - head_ + (next_ - seen_) >= records_.size()) found = CROWDED;
    return found;
  }

  void settle(Parked why) {
    if (settled_ == RUNNING || why < settled_) settled_ = why;
  }

  bool sampled() const { return __atomic_load_n(&ring_[seen_ % slots_].step, __ATOMIC_ACQUIRE) == seen_ + 1; }

  // Until the oldest step in flight has sampled. Looks at the ring all the time, at the card once in a millisecond.
  Parked await_step() {
    constexpr auto LOOK = std::chrono::milliseconds(1);
    const auto begun = Clock::now();
    auto look = begun + LOOK;
    for (uint32_t tries = 1; !sampled(); ++tries) {
      pause();
      if (tries % 64) continue;
      std::this_thread::yield();  // where cores are few, what it waits for may need this one
      const auto now = Clock::now();
      if (now < look) continue;
      look = now + LOOK;
      const int state = card_->state();
      if (state == Card::BUSY && now - begun < limit_) continue;
      if (sampled()) break;  // and then it ended
      code_ = state == Card::BUSY ? 0 : state;
      return state == Card::IDLE ? ABORTED : LOST;
    }
    return RUNNING;
  }

  void hand_on() {
    const HostStep& step = ring_[seen_ % slots_];
    StepRecord& record = records_[tail_ % records_.size()];
    record.number = seen_;
    record.started_ns = card_->started_ns();
    for (int row = 0; row < MAX_ROWS; ++row) {
      record.tokens[row] = -1, record.status[row] = 0;
      if (!live_[row]) continue;
      record.status[row] = step.status[row];
      if (!step.status[row]) record.tokens[row] = step.tokens[row];
      const auto ends = ends_.begin();
      const bool end = std::binary_search(ends + run_.ends_at[row], ends + run_.ends_at[row + 1], record.tokens[row]);
      const bool fault = record.tokens[row] < 0;
      if (!end && !fault) continue;
      live_[row] = false;
      settle(fault ? FAULT : END);
    }
    ++seen_;
    ++tail_;
    if (!reader_waits_) return;
    std::lock_guard<std::mutex> lock(mutex_);  // it has not gone to sleep between its look and ours
    readable_.notify_all();
  }

  // The reader is as far behind as it may be, and nothing is in flight.
  void await_reader() {
    std::unique_lock<std::mutex> lock(mutex_);
    loop_waits_ = true;
    wake_.wait(lock, [this] { return asked_ || tail_ - head_ < records_.size(); });
    loop_waits_ = false;
  }

  int take(StepRecord* out, int room) {
    const uint64_t head = head_;
    const int count = static_cast<int>(std::min<uint64_t>(room, tail_ - head));
    for (int i = 0; i < count; ++i) out[i] = records_[(head + i) % records_.size()];
    head_ = head + count;
    if (count && loop_waits_) {
      std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
    return count;
  }

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  const std::unique_ptr<Card> card_;
  const HostStep* const ring_;
  const uint64_t slots_, ahead_;
  const std::chrono::nanoseconds limit_;

  // The run's, and the loop's alone while it is not parked.
  LoopRun run_{};
  std::vector<int32_t> ends_;
  bool live_[MAX_ROWS]{};
  uint64_t seen_ = 0, next_ = 0;  // launches whose tokens were read, and all
  Parked settled_ = RUNNING;      // what parks this run whatever comes
  int code_ = 0;

  // Shared. Queue: the loop alone moves `tail_`, the reader alone `head_`. A side that waits says so first, then looks;
  // the other moves first, then looks whether somebody waits. All in one order of all (the atomics' default), so that
  // no wake-up is lost.
  std::vector<StepRecord> records_;
  std::atomic<uint64_t> head_{0}, tail_{0};
  std::atomic<bool> reader_waits_{false}, loop_waits_{false}, asked_{false};
  std::atomic<int> held_[MAX_ROWS]{};
  std::atomic<int> parked_{ASKED};
  bool stopping_ = false, ended_ = false;
  std::mutex mutex_;
  std::condition_variable wake_, readable_;
  std::thread thread_;  // last: it uses all of the above
};
