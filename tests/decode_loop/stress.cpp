// The decode loop over a card made of a thread: stress NAME SEED [ROUNDS] exits 0, or says which check failed.
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <string>

#include "decode_loop.cuh"

#define CHECK(condition) \
  if (!(condition)) std::fprintf(stderr, "line %d: %s\n", __LINE__, #condition), std::_Exit(1)

using std::chrono::milliseconds;
using std::chrono::nanoseconds;

constexpr int VOCAB = 97;
constexpr uint64_t ANY = ~0ull;  // steps
constexpr nanoseconds LONG = std::chrono::seconds(20);
using Random = std::mt19937;

int draw(Random& random, int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); }

// What a row's token is followed by, as a function of all before it: a row that is fed wrongly never recovers.
int following(int token, int context) { return (token * 31 + context * 17 + 5) % VOCAB; }

// What a fake card is to do wrong, by number of the launch, and how long it takes.
struct Faults {
  uint64_t silent_from = ~0ull, stuck_from = ~0ull, refused_from = ~0ull;
  uint64_t status_at = ~0ull;  // in row `status_row`
  int status_row = 0, slow_us = 0, launch_us = 0;
};

// The host's side of a batch: what the card starts from, and what rows have been granted.
struct Batch {
  int rows = 0, keys[MAX_ROWS]{}, tokens[MAX_ROWS]{};
  std::atomic<int> granted[MAX_ROWS]{};
};

class FakeCard final : public Card {
 public:
  FakeCard(std::vector<HostStep>& ring, uint64_t ahead, unsigned seed, const Faults& faults)
      : ring_(ring), ahead_(ahead), random_(seed), faults_(faults), device_([this] { run(); }) {}
  ~FakeCard() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      CHECK(queue_.empty() || faults_.stuck_from != ~0ull);  // a loop leaves nothing in flight behind
      over_ = true;
    }
    work_.notify_all();
    device_.join();
  }
  void load(const void* params) override {
    batch_ = static_cast<const Batch*>(params);
    for (int row = 0; row < MAX_ROWS; ++row) keys_[row] = batch_->keys[row], tokens_[row] = batch_->tokens[row];
    queued_ = 0;
  }
  void attach() override { loop_ = std::this_thread::get_id(); }
  int launch(uint64_t number) override {
    CHECK(std::this_thread::get_id() == loop_);
    if (faults_.launch_us) std::this_thread::sleep_for(std::chrono::microseconds(faults_.launch_us));
    if (number >= faults_.refused_from) return 719;
    for (int row = 0; row < batch_->rows; ++row)  // no row is ever taken further than its pages
      if (keys_[row]) CHECK(keys_[row] + queued_ <= batch_->granted[row]);
    ++queued_;
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(number);
    CHECK(queue_.size() <= ahead_);
    work_.notify_all();
    return 0;
  }
  int state() override {
    std::lock_guard<std::mutex> lock(mutex_);
    return queue_.empty() ? IDLE : BUSY;
  }
  int64_t started_ns() override { return ++asked_; }

 private:
  void run() {
    int done = 0;
    const Batch* batch = nullptr;
    int keys[MAX_ROWS], tokens[MAX_ROWS];  // the device's own: it is steps behind the launches
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      work_.wait(lock, [this] { return over_ || !queue_.empty(); });
      if (over_) return;
      const uint64_t number = queue_.front();
      if (number >= faults_.stuck_from) {
        work_.wait(lock, [this] { return over_; });
        return;
      }
      if (batch != batch_) batch = batch_, done = 0;
      if (!done)
        for (int row = 0; row < MAX_ROWS; ++row) keys[row] = keys_[row], tokens[row] = tokens_[row];
      ++done;
      const int us = faults_.slow_us ? draw(random_, 0, faults_.slow_us) : 0;
      lock.unlock();
      if (us) std::this_thread::sleep_for(std::chrono::microseconds(us));
      lock.lock();
      if (number < faults_.silent_from) sample(number, batch->rows, keys, tokens);
      queue_.pop_front();
    }
  }
  void sample(uint64_t number, int rows, int* keys, int* tokens) {
    HostStep& out = ring_[number % ring_.size()];
    for (int row = 0; row < rows; ++row) {
      const bool fault = number == faults_.status_at && row == faults_.status_row;
      if (keys[row]) tokens[row] = following(tokens[row], keys[row]++);
      out.tokens[row] = keys[row] && !fault ? tokens[row] : -1;
      out.status[row] = keys[row] && fault ? 3 : 0;
    }
    __atomic_store_n(&out.step, number + 1, __ATOMIC_RELEASE);
  }

  std::vector<HostStep>& ring_;
  const uint64_t ahead_;
  Random random_;
  const Faults faults_;
  const Batch* batch_ = nullptr;
  int keys_[MAX_ROWS]{}, tokens_[MAX_ROWS]{}, queued_ = 0;
  int64_t asked_ = 0;
  std::thread::id loop_;
  std::mutex mutex_;
  std::condition_variable work_;
  std::deque<uint64_t> queue_;
  bool over_ = false;
  std::thread device_;
};

// A loop and all that it is made over. Batches live as long: the device tells one from the next by its address.
struct Rig {
  std::vector<HostStep> ring;
  std::unique_ptr<DecodeLoop> loop;
  std::deque<Batch> batches;
  uint64_t launched = 0;
  Rig(int slots, int ahead, int capacity, unsigned seed, const Faults& faults = {}, nanoseconds limit = LONG)
      : ring(slots),
        loop(new DecodeLoop(std::make_unique<FakeCard>(ring, std::min({ahead, slots, capacity}), seed, faults), ring.data(),
                            slots, ahead, capacity, limit)) {}

  // Begins a run of `rows` rows; ends: of row 0.
  Batch& resume(int rows, uint64_t steps, int held, int budget, const std::vector<int32_t>& ends = {}, int keys = 10) {
    Batch& batch = batches.emplace_back();
    LoopRun run{};
    run.first = launched, run.steps = steps;
    run.rows = batch.rows = rows;
    for (int row = 0; row < rows; ++row) {
      run.keys[row] = batch.keys[row] = keys + row;
      run.held[row] = batch.granted[row] = held;
      run.budget[row] = budget;
      run.ends_at[row + 1] = static_cast<int>(ends.size());
      batch.tokens[row] = (row * 13 + keys) % VOCAB;
    }
    run.ends = ends.data();
    CHECK(loop->resume(&batch, run));
    return batch;
  }
  // All that a run still gives; how it ended.
  std::vector<StepRecord> rest(int room = 3) {
    std::vector<StepRecord> found, some(room);
    int count;
    while ((count = loop->read(some.data(), room, LONG)) > 0) found.insert(found.end(), some.begin(), some.begin() + count);
    CHECK(count == 0);
    return found;
  }
  LoopState ended() {
    const LoopState state = loop->state();
    CHECK(state.parked != RUNNING && state.parked != CROWDED);
    launched += state.launches;
    return state;
  }
};

// Every row's tokens follow one another, row 0's until it ends; numbers and times ascend without a gap.
void check_streams(const Batch& batch, const std::vector<StepRecord>& records, uint64_t first, const std::vector<int32_t>& ends) {
  int tokens[MAX_ROWS], keys[MAX_ROWS];
  bool live[MAX_ROWS];
  for (int row = 0; row < batch.rows; ++row) tokens[row] = batch.tokens[row], keys[row] = batch.keys[row], live[row] = true;
  for (size_t i = 0; i < records.size(); ++i) {
    CHECK(records[i].number == first + i);
    CHECK(i == 0 || records[i].started_ns == records[i - 1].started_ns + 1);
    for (int row = 0; row < MAX_ROWS; ++row) {
      if (row >= batch.rows || !live[row]) {
        CHECK(records[i].tokens[row] == -1 && records[i].status[row] == 0);
        continue;
      }
      tokens[row] = following(tokens[row], keys[row]++);
      CHECK(records[i].tokens[row] == tokens[row]);
      if (!row && std::find(ends.begin(), ends.end(), tokens[row]) != ends.end()) live[row] = false;
    }
  }
}

// ---- scenarios ----

// Runs of every kind one after the other: budgets, ends, pages that are granted late, a ring and a queue that wrap, a
// reader that is slow, parks at any time.
void runs(Random& random, int rounds) {
  const int slots = draw(random, 2, 9), ahead = draw(random, 1, 4), capacity = draw(random, 1, 6);
  Faults slow;
  slow.slow_us = draw(random, 0, 60);
  Rig rig(slots, ahead, capacity, random(), slow);
  std::map<int, int> reasons;
  for (int round = 0; round < rounds; ++round) {
    const int rows = draw(random, 1, MAX_ROWS), keys = draw(random, 1, 90);
    const uint64_t steps = draw(random, 0, 3) ? ANY : draw(random, 0, 12);
    const int budget = draw(random, 0, 40);
    const std::vector<int32_t> ends = draw(random, 0, 2) ? std::vector<int32_t>{} : std::vector<int32_t>{3, 50, 51, 52, 90};
    int held = keys + rows + draw(random, 0, 20);
    const uint64_t first = rig.launched;
    Batch& batch = rig.resume(rows, steps, held, budget, ends, keys);
    std::vector<StepRecord> found;
    StepRecord some[4];
    bool asked = false;
    int count;
    while ((count = rig.loop->read(some, draw(random, 1, 4), LONG)) > 0) {
      found.insert(found.end(), some, some + count);
      if (draw(random, 0, 3) == 0) {  // more pages: first the card's, then the word
        held += draw(random, 0, 30);
        for (int row = 0; row < rows; ++row) batch.granted[row] = held, rig.loop->grant(row, held);
      }
      if (draw(random, 0, 20) == 0) rig.loop->park(), asked = true;
      if (draw(random, 0, 8) == 0) std::this_thread::sleep_for(std::chrono::microseconds(draw(random, 0, 200)));
    }
    CHECK(count == 0);
    const LoopState state = rig.ended();
    CHECK(state.launches == found.size());  // nothing is lost, and nothing is decoded twice
    check_streams(batch, found, first, ends);
    ++reasons[state.parked];
    const int done = static_cast<int>(found.size());
    switch (state.parked) {
      case ASKED: CHECK(asked); break;
      case STEPS: CHECK(found.size() == steps); break;
      case BUDGET: CHECK(done == budget); break;
      case ROOM: CHECK(keys + rows - 1 + done > held - 30); break;
      case END: CHECK(!ends.empty()); break;
      default: CHECK(false);
    }
    CHECK(found.size() <= steps && done <= budget && (done == 0 || keys + rows - 2 + done <= held));
  }
  if (rounds >= 100) CHECK(reasons.size() >= 4);
}

// A row ends where its token is one of its own, and gets nothing more; others go on to the end of what is in flight.
void ends(Random& random, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    const int ahead = draw(random, 1, 4);
    Rig rig(8, ahead, 16, random());
    const std::vector<int32_t> ends{draw(random, 0, VOCAB / 2), draw(random, VOCAB / 2 + 1, VOCAB - 1)};
    Batch& batch = rig.resume(2, ANY, 500, 400, ends);
    const auto found = rig.rest();
    const LoopState state = rig.ended();
    int token = batch.tokens[0], at = 0;
    do token = following(token, 10 + at++);
    while (token != ends[0] && token != ends[1] && at < 400);
    int other = batch.tokens[1];
    for (size_t i = 0; i < found.size(); ++i) {
      CHECK((found[i].tokens[0] == -1) == (static_cast<int>(i) >= at));
      other = following(other, 11 + static_cast<int>(i));
      CHECK(found[i].tokens[1] == other);
    }
    CHECK(state.parked == (at < 400 || token == ends[0] || token == ends[1] ? END : BUDGET));
    CHECK(static_cast<int>(found.size()) >= at && static_cast<int>(found.size()) < at + ahead);
  }
}

// Somebody asks for a park at any moment: before, during and after runs that end by themselves.
void park_races(Random& random, int rounds) {
  Rig rig(4, 3, 4, random());
  std::atomic<bool> over{false};
  std::thread nuisance([&] {
    while (!over) rig.loop->park(), std::this_thread::yield();
  });
  for (int round = 0; round < rounds; ++round) {
    const uint64_t first = rig.launched;
    Batch& batch = rig.resume(3, draw(random, 0, 20), 500, 400);
    const auto found = rig.rest(draw(random, 1, 5));
    const LoopState state = rig.ended();
    CHECK(state.parked == ASKED || state.parked == STEPS);
    CHECK(state.launches == found.size());
    check_streams(batch, found, first, {});
  }
  over = true;
  nuisance.join();
}

// A reader that stays away: the loop stops launching, and goes on where it was when the reader is back, or parks.
void slow_reader(Random& random, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    const int capacity = draw(random, 1, 5);
    Rig rig(16, 4, capacity, random());
    Batch& batch = rig.resume(2, 40, 500, 400);
    std::vector<StepRecord> found;
    StepRecord one;
    while (rig.loop->read(&one, 1, LONG)) {
      found.push_back(one);
      if (draw(random, 0, 4) == 0) std::this_thread::sleep_for(milliseconds(1));
      const HostStep& beyond = rig.ring[(found.size() + capacity) % 16];  // not to be launched before the next read
      CHECK(__atomic_load_n(&beyond.step, __ATOMIC_RELAXED) <= found.size() + capacity);
      if (round % 2 && found.size() == 20) rig.loop->park();
    }
    const LoopState state = rig.ended();
    CHECK(state.parked == (round % 2 ? ASKED : STEPS) && state.launches == found.size());
    CHECK(found.size() == 40 || round % 2);
    check_streams(batch, found, 0, {});
  }
}

// What a broken card leads to: a reason and a code within the limit, after all that it had sampled.
void faults(Random& random, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    const int at = draw(random, 0, 12), kind = round % 4;
    Faults broken;
    (kind == 0 ? broken.silent_from : kind == 1 ? broken.stuck_from : kind == 2 ? broken.refused_from : broken.status_at) = at;
    broken.status_row = 1;
    broken.slow_us = 20;
    Rig rig(4, 3, 8, random(), broken, kind == 1 ? milliseconds(30) : LONG);
    rig.resume(3, ANY, 500, 400);
    const auto begun = std::chrono::steady_clock::now();
    const auto found = rig.rest();
    CHECK(std::chrono::steady_clock::now() - begun < std::chrono::seconds(10));
    const LoopState state = rig.ended();
    const Parked expected[] = {ABORTED, LOST, REFUSED, FAULT};
    CHECK(state.parked == expected[kind] && state.code == (kind == 2 ? 719 : 0));
    if (kind < 3) CHECK(static_cast<int>(found.size()) == at);
    if (kind < 3) continue;
    CHECK(static_cast<int>(found.size()) > at && found[at].status[1] == 3 && found[at].tokens[1] == -1);
    for (size_t i = at + 1; i < found.size(); ++i) CHECK(found[i].tokens[1] == -1 && found[i].status[1] == 0);
    for (const StepRecord& step : found) CHECK(step.tokens[0] >= 0 && step.tokens[2] >= 0);
    rig.resume(3, 5, 500, 400);  // and the loop goes on
    CHECK(rig.rest().size() == 5);
  }
}

// Ended at any moment: while it launches, with tokens that nobody has read, parked, never begun.
void stops(Random& random, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    Faults slow;
    slow.launch_us = draw(random, 0, 1) * 300, slow.slow_us = draw(random, 0, 200);
    Rig rig(4, 3, draw(random, 1, 8), random(), slow);
    StepRecord some[2];
    if (round % 8) rig.resume(2, draw(random, 0, 1) ? ANY : 4, 500, 400);
    if (round % 3) rig.loop->read(some, 2, milliseconds(1));
    if (round % 2) std::this_thread::sleep_for(std::chrono::microseconds(draw(random, 0, 800)));
    rig.loop.reset();
  }
}

// A reader waits no longer than it says, and is woken by a park without tokens.
void patience(Random& random, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    Faults stuck;
    stuck.stuck_from = 2;
    Rig rig(4, 2, 4, random(), stuck, milliseconds(60));
    StepRecord one;
    rig.resume(1, 0, 500, 400);
    CHECK(rig.loop->read(&one, 1, LONG) == 0 && rig.ended().parked == STEPS);
    rig.resume(1, ANY, 500, 400);
    CHECK(rig.loop->read(&one, 1, LONG) == 1 && rig.loop->read(&one, 1, LONG) == 1);
    CHECK(rig.loop->read(&one, 1, milliseconds(5)) == -1);
    CHECK(!rig.loop->resume(&rig.batches.back(), LoopRun{}));  // it runs
    CHECK(rig.loop->read(&one, 1, LONG) == 0 && rig.ended().parked == LOST);
  }
}

int main(int argc, char** argv) {
  const std::map<std::string, std::function<void(Random&, int)>> scenarios{
      {"runs", runs},     {"ends", ends},   {"park_races", park_races}, {"slow_reader", slow_reader},
      {"faults", faults}, {"stops", stops}, {"patience", patience},
  };
  CHECK(argc >= 3 && scenarios.count(argv[1]));
  Random random(std::atoi(argv[2]));
  scenarios.at(argv[1])(random, argc > 3 ? std::atoi(argv[3]) : 100);
  return 0;
}
