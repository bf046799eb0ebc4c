// Deals Muon's matrices to ranks and runs them in rounds: momentum, Newton-Schulz at home, exchange, step; see muon.h.
#include "optim/muon.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

#include "base/check.h"
#include "base/hash.h"
#include "ddp/transport/torch/torch_group.h"
#include "formats/storage_torch.h"
#include "optim/launch.h"
#include "optim/newton_schulz.h"

namespace drivetrain::optim {
namespace {

// Elements that one rank orthogonalizes in a round: the iteration keeps about four copies of them in bfloat16.
constexpr int64_t kRoundElements = 1 << 23;
// Elements of all ranks in a round, which each rank holds in bfloat16.
constexpr int64_t kAllElements = 1 << 25;
constexpr int64_t kElementBytes = 2;  // of bfloat16
constexpr int kPlaceOfRowMeans = 1;   // among the states of a rule that has it

// Returns the key of matrices that may share an iteration: their shape in memory, and the iteration's arguments.
auto key_of(const ParamJob& param, const MuonArgs& args) {
  return std::tuple(param.is_transposed ? std::pair(param.columns, param.rows) : std::pair(param.rows, param.columns),
                    param.is_transposed, args.iteration());
}

// Returns the first row of a rank's part, as torch.chunk() divides rows.
int64_t first_row(int64_t rows, int rank, int size) { return std::min(rows, (rows + size - 1) / size * rank); }
int64_t rows_of_rank(int64_t rows, int rank, int size) {
  return first_row(rows, rank + 1, size) - first_row(rows, rank, size);
}

// Deals matrices to homes, the most expensive first, each to the rank with the least to do. Returns the indices of each
// rank's matrices.
std::vector<std::vector<int32_t>> deal(const std::vector<ParamJob>& wholes, const std::vector<MuonArgs>& args,
                                       int num_ranks) {
  std::vector<double> costs;
  for (size_t i = 0; i < wholes.size(); ++i) {
    const double rows = static_cast<double>(wholes[i].rows) / args[i].num_heads;
    const double per_element = args[i].iterations * std::min(rows, static_cast<double>(wholes[i].columns));
    costs.push_back(static_cast<double>(wholes[i].numel) * (1 + per_element));
  }
  std::vector<int32_t> order(wholes.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return costs[a] > costs[b]; });
  std::vector<std::vector<int32_t>> homes(num_ranks);
  std::vector<double> of_rank(num_ranks);
  for (const int32_t i : order) {
    const auto least = std::min_element(of_rank.begin(), of_rank.end()) - of_rank.begin();
    homes[least].push_back(i);
    of_rank[least] += costs[i];
  }
  return homes;
}

TypedArray values_in(const at::Tensor& memory, int64_t begin) {
  return {static_cast<uint16_t*>(memory.data_ptr()) + begin, Format::kBFloat16};
}

at::Tensor view_of(const at::Tensor& memory, const MuonMatrices& matrices) {
  return memory.narrow(0, matrices.begin, matrices.numel()).view({matrices.number, matrices.rows, matrices.columns});
}

// The iteration alternates between two buffers. Returns true if it begins with the one that gets its result.
bool begins_with_result(const MuonArgs& args) { return static_cast<int>(args.iterations) % 2 == 0; }

// Copies the rows of all ranks between whole matrices and a message, which has rank after rank.
void copy_rows(const MuonRound& round, const at::Tensor& wholes, const at::Tensor& scratch, const at::Tensor& message,
               int num_ranks, bool is_result) {
  int64_t at = 0;
  for (int rank = 0; rank < num_ranks; ++rank) {
    for (const MuonMatrices& matrices : round.mine) {
      const int64_t rows = rows_of_rank(matrices.rows, rank, num_ranks);
      const at::Tensor& memory = is_result || begins_with_result(matrices.args) ? wholes : scratch;
      const at::Tensor whole = view_of(memory, matrices).narrow(1, first_row(matrices.rows, rank, num_ranks), rows);
      const int64_t numel = matrices.number * rows * matrices.columns;
      const at::Tensor part = message.narrow(0, at, numel).view(whole.sizes());
      is_result ? part.copy_(whole) : whole.copy_(part);
      at += numel;
    }
  }
}

// Orthogonalizes each head of matrices, and leaves the results in the buffer that is to get them.
void orthogonalize_heads(const MuonMatrices& matrices, const at::Tensor& result, const at::Tensor& other) {
  at::Tensor first = view_of(result, matrices), second = view_of(other, matrices);
  if (!begins_with_result(matrices.args)) std::swap(first, second);
  const auto heads = static_cast<int64_t>(matrices.args.num_heads);
  if (heads > 1 && matrices.is_transposed) {  // Heads are columns in memory.
    const std::vector<int64_t> shape = {matrices.number, matrices.rows, heads, matrices.columns / heads};
    const auto apart = [&](const at::Tensor& memory) {
      return memory.view(shape).transpose(1, 2).contiguous().view({-1, shape[1], shape[3]});
    };
    const at::Tensor from = apart(first), to = at::empty_like(from);
    orthogonalize(from, to, matrices.args);
    const at::Tensor& done = begins_with_result(matrices.args) ? from : to;
    view_of(result, matrices).view(shape).copy_(done.view({shape[0], heads, shape[1], shape[3]}).transpose(1, 2));
    return;
  }
  const std::vector<int64_t> shape = {matrices.number * heads, matrices.rows / heads, matrices.columns};
  orthogonalize(first.view(shape), second.view(shape), matrices.args);
}

// Returns the values that a job has there, as a tensor of these sizes.
at::Tensor tensor_of(const TypedArray& values, at::IntArrayRef sizes, c10::Device device) {
  return at::from_blob(values.data, sizes, at::TensorOptions(dtype_of(values.format)).device(device));
}

// Divides each row of a result by the root of the mean of its squares over steps. Each head keeps its norm. Source: Li
// et al. 2025, "NorMuon", algorithm 1, with the norm of the authors' implementation.
void normalize_rows(const ParamJob& step, const MuonArgs& args, c10::Device device, const GradScaling* scaling) {
  const at::Tensor result = step.is_transposed ? tensor_of(step.grad, {step.columns, step.rows}, device).t()
                                               : tensor_of(step.grad, {step.rows, step.columns}, device);
  const at::Tensor values = result.to(at::kFloat), squares = values.square().mean(1);
  const at::Tensor kept = tensor_of(step.state[kPlaceOfRowMeans], {step.rows}, device);
  at::Tensor means = kept.to(at::kFloat).lerp(squares, 1 - args.beta2);
  if (scaling != nullptr) {  // The host does not know whether the step is skipped.
    auto* const skips = const_cast<bool*>(&scaling->skips);
    means = at::where(at::from_blob(skips, {1}, at::TensorOptions(at::kBool).device(device)), kept, means);
  }
  kept.copy_(means);
  constexpr double kTiny = 1e-10;  // as in the authors' implementation, for matrices of zeros
  const at::Tensor factors = means.sqrt().add_(kTiny).reciprocal_();
  const std::vector<int64_t> by_head = {static_cast<int64_t>(args.num_heads), -1};
  const at::Tensor before = squares.view(by_head).sum(1, /*keepdim=*/true).sqrt();
  const at::Tensor after = squares.mul(factors).mul_(factors).view(by_head).sum(1, /*keepdim=*/true).sqrt();
  factors.view(by_head).mul_(before.div(after.add(kTiny)));
  result.copy_(values.mul(factors.unsqueeze(1)));
}

// Runs a part of an exchange between ranks. Its error says what the step has done.
template <class Part>
auto exchanging(const char* done, Part&& part) {
  try {
    return part();
  } catch (const std::exception& error) {
    throw EnvironmentError(text("Muon's ranks could not exchange matrices: ", error.what(), "\n", done));
  }
}
constexpr const char* kNothingDone =
    "Nothing has changed. Every rank must reach step(): look for an error of another one.";
constexpr const char* kPartlyDone = "This step has updated some parameters only: load a checkpoint.";

// The indices of a round's matrices, by home.
struct DealtRound {
  std::vector<std::vector<int32_t>> homes;
  int64_t most = 0;  // elements at the home that has most
};

// Deals matrices to homes, and divides what each has into rounds.
std::vector<DealtRound> divide(const std::vector<ParamJob>& wholes, const std::vector<MuonArgs>& args, int size) {
  int64_t most = std::min(kRoundElements, kAllElements / size);
  for (const ParamJob& whole : wholes) most = std::max(most, whole.numel);
  std::vector<DealtRound> rounds;
  std::vector<std::vector<int32_t>> homes = deal(wholes, args, size);
  for (int home = 0; home < size; ++home) {
    const auto key = [&](int32_t i) { return std::tuple(key_of(wholes[i], args[i]), i); };
    std::sort(homes[home].begin(), homes[home].end(), [&](int32_t a, int32_t b) { return key(a) < key(b); });
    size_t round = 0;
    int64_t elements = 0;
    for (const int32_t i : homes[home]) {
      if (elements + wholes[i].numel > most) {
        ++round;
        elements = 0;
      }
      elements += wholes[i].numel;
      if (round == rounds.size()) rounds.push_back({std::vector<std::vector<int32_t>>(size)});
      rounds[round].homes[home].push_back(i);
      rounds[round].most = std::max(rounds[round].most, elements);
    }
  }
  return rounds;
}

// Allocates the rounds' buffers. Rounds that exchange rows begin while the one before is orthogonalized and the one
// before that returns.
void allocate(MuonPlan& plan, const std::vector<DealtRound>& rounds, const ParamJob* params) {
  const bool hold_rows = plan.ranks.hold_rows();
  int64_t at_home = 0, here = 0;
  for (const DealtRound& round : rounds) {
    int64_t of_round = 0;
    for (const auto& matrices : round.homes) {
      for (const int32_t i : matrices) of_round += params[i].numel;
    }
    at_home = std::max(at_home, round.most);
    here = std::max(here, of_round);
  }
  const auto elements = [&](int64_t numel) {
    return at::empty({numel}, at::TensorOptions(at::kBFloat16).device(plan.ranks.device));
  };
  const size_t turns = std::min(rounds.size(), hold_rows ? size_t{3} : std::min<size_t>(plan.ranks.size, 2));
  for (size_t turn = 0; turn < turns; ++turn) {
    plan.results.push_back(elements(hold_rows ? here : plan.ranks.size * at_home));
    if (hold_rows) plan.messages.push_back(elements(at_home));
  }
  plan.scratch = elements(at_home);
  if (hold_rows) plan.wholes = elements(at_home);
}

// Adds a matrix at home on this rank to the round. continues: it may share the iteration of the one before.
void add_mine(MuonRound& round, const ParamJob& whole, const MuonArgs& args, int64_t begin, bool continues,
              const MuonRanks& ranks) {
  const auto [rows, columns] = std::get<0>(key_of(whole, args));
  if (!continues) round.mine.push_back({0, rows, columns, whole.is_transposed, begin, args});
  ++round.mine.back().number;
  for (int rank = 0; ranks.hold_rows() && rank < ranks.size; ++rank) {
    round.taken[rank] += rows_of_rank(rows, rank, ranks.size) * columns * kElementBytes;
  }
}

void add_round(MuonPlan& plan, const DealtRound& dealt, const ParamJob* params, const std::vector<ParamJob>& wholes,
               const std::vector<MuonArgs>& args) {
  const MuonRanks& ranks = plan.ranks;
  const at::Tensor& results = plan.results[plan.rounds.size() % plan.results.size()];
  MuonRound& round = plan.rounds.emplace_back();
  round.first = static_cast<int32_t>(plan.order.size());
  round.most = dealt.most;
  round.sent.resize(ranks.size);
  round.taken.resize(ranks.size);
  int64_t here = 0;
  for (int home = 0; home < ranks.size; ++home) {
    int64_t begin = 0;
    int32_t before = -1;
    for (const int32_t i : dealt.homes[home]) {
      const bool continues = before >= 0 && key_of(wholes[before], args[before]) == key_of(wholes[i], args[i]);
      if (home == ranks.rank) add_mine(round, wholes[i], args[i], begin, continues, ranks);
      before = i;
      ParamJob job = params[i];
      job.rule = static_cast<int32_t>(plan.order.size());
      job.rows = wholes[i].rows;                     // The step's size depends on the whole matrix's shape.
      job.begin = num_blocks(round.total) * kBlock;  // States may have blocks.
      round.total = job.begin + job.numel;
      round.sent[home] += job.numel * kElementBytes;
      const TypedArray result = values_in(results, ranks.hold_rows() ? here : home * round.most + begin);
      plan.order.push_back(i);
      plan.args.push_back(args[i]);
      plan.momenta.push_back(job);
      plan.steps.push_back(job);
      plan.steps.back().grad = result;
      // The momentum goes where the iteration or the exchange begins. Other homes' places hold it for nothing.
      const bool begins_in_scratch = home == ranks.rank && !ranks.hold_rows() && !begins_with_result(args[i]);
      plan.momenta.back().param = begins_in_scratch ? values_in(plan.scratch, begin) : result;
      ++round.number;
      begin += wholes[i].numel;
      here += job.numel;
    }
  }
}

}  // namespace

MuonPlan plan_muon(const ParamJob* params, const std::vector<MuonArgs>& args, MuonRanks ranks, MuonTotals& totals) {
  std::vector<ParamJob> wholes(params, params + args.size());
  for (size_t i = 0; i < wholes.size(); ++i) {
    ParamJob& whole = wholes[i];
    if (ranks.hold_rows()) {
      DT_INVARIANT(!whole.is_transposed && whole.rows == rows_of_rank(ranks.whole_rows[i], ranks.rank, ranks.size));
      DT_INVARIANT(whole.state[kPlaceOfRowMeans].data == nullptr);  // They need the norm of all rows.
      whole.rows = ranks.whole_rows[i];
      whole.numel = whole.rows * whole.columns;
    }
    const auto heads = static_cast<int64_t>(args[i].num_heads);
    if (whole.rows % heads != 0) {
      throw UserError(text("num_heads is ", heads, ", but a matrix of its group has ", whole.rows, " rows and ",
                           whole.columns, " columns: expected a divisor of the rows."));
    }
    const auto iteration = args[i].iteration();
    const double beta2 = whole.state[kPlaceOfRowMeans].data != nullptr ? args[i].beta2 : -1;
    totals.hash = mix(totals.hash, hash_bytes(&beta2, sizeof(beta2)));
    totals.hash = mix(mix(totals.hash, whole.rows), whole.columns << 1 | whole.is_transposed);
    totals.hash = mix(totals.hash, hash_bytes(iteration.data(), sizeof(iteration)));
    totals.elements += whole.numel;
    ++totals.matrices;
  }
  MuonPlan plan;
  plan.ranks = std::move(ranks);
  const std::vector<DealtRound> rounds = divide(wholes, args, plan.ranks.size);
  allocate(plan, rounds, params);
  for (const DealtRound& round : rounds) add_round(plan, round, params, wholes, args);
  return plan;
}

void check_totals(const MuonRanks& ranks, const MuonTotals& mine, uint64_t& agreed) {
  if (!ranks.comm) return;
  const uint64_t hash = mix(mix(mine.hash, ranks.group), mine.skips);
  if (ranks.device.is_cuda() && hash == agreed) return;
  constexpr int64_t kNumbers = 4;
  const at::Tensor here = at::tensor({static_cast<int64_t>(hash), mine.matrices, mine.elements, int64_t{mine.skips}});
  const at::Tensor all = at::empty({ranks.size, kNumbers}, here.options().device(ranks.device));
  const at::Tensor found = exchanging(kNothingDone, [&] {
    ranks.comm->start_all_gather(all, here.to(ranks.device))->wait();
    return all.cpu();
  });
  const auto described = [&](int rank) {
    const int64_t* numbers = found.const_data_ptr<int64_t>() + kNumbers * rank;
    return text(ranks.comm->ranks().name(rank), numbers[3] != 0 ? " skips " : " steps ", numbers[1], " matrices with ",
                numbers[2], " elements");
  };
  for (int rank = 0; rank < ranks.size; ++rank) {
    if (found.const_data_ptr<int64_t>()[kNumbers * rank] == static_cast<int64_t>(hash)) continue;
    throw UserError(text("Muon's ranks share matrices, but ", described(rank), ", and ", described(ranks.rank),
                         ", or shapes, layouts or options differ. Nothing has changed. Give the same matrices reduced "
                         "gradients on every rank, or leave process_group out."));
  }
  agreed = hash;
}

void run_muon(MuonPlan& plan, const StepJob& job, const ParamJob* momenta, const ParamJob* steps,
              const std::function<void(const StepJob&)>& run) {
  const MuonRanks& ranks = plan.ranks;
  const bool hold_rows = ranks.hold_rows();
  const size_t num_rounds = plan.rounds.size(), num_buffers = plan.results.size();
  std::vector<std::unique_ptr<ddp::TorchReduce>> to_home(num_buffers), from_home(num_buffers);
  const auto pass_of = [&](const MuonRound& round, RuleKind kind, const ParamJob* params) {
    StepJob pass = job;
    pass.num_params = round.number;
    pass.total = round.total;
    pass.kind = kind;
    pass.params = params + round.first;
    return pass;
  };
  const auto bytes_of = [](const at::Tensor& memory, const std::vector<int64_t>& counts) {
    const int64_t bytes = std::accumulate(counts.begin(), counts.end(), int64_t{0});
    return memory.view(at::kByte).narrow(0, 0, bytes);
  };
  const auto begin = [&](size_t r) {
    const MuonRound& round = plan.rounds[r];
    run(pass_of(round, RuleKind::kMuonMomentum, momenta));
    if (!hold_rows) return;
    const size_t b = r % num_buffers;
    to_home[b] = exchanging(kPartlyDone, [&] {
      return ranks.comm->start_all_to_all(bytes_of(plan.messages[b], round.taken),
                                          bytes_of(plan.results[b], round.sent), round.taken, round.sent);
    });
  };
  const auto orthogonalize_mine = [&](size_t r) {
    const MuonRound& round = plan.rounds[r];
    const size_t b = r % num_buffers;
    const at::Tensor results = hold_rows ? plan.wholes : plan.results[b].narrow(0, ranks.rank * round.most, round.most);
    if (hold_rows) {
      exchanging(kPartlyDone, [&] { to_home[b]->wait(); });
      copy_rows(round, plan.wholes, plan.scratch, plan.messages[b], ranks.size, /*is_result=*/false);
    }
    for (const MuonMatrices& matrices : round.mine) orthogonalize_heads(matrices, results, plan.scratch);
    if (hold_rows) {
      copy_rows(round, plan.wholes, plan.scratch, plan.messages[b], ranks.size, /*is_result=*/true);
      from_home[b] = exchanging(kPartlyDone, [&] {
        return ranks.comm->start_all_to_all(bytes_of(plan.results[b], round.sent),
                                            bytes_of(plan.messages[b], round.taken), round.sent, round.taken);
      });
    } else if (ranks.comm) {
      from_home[b] = exchanging(kPartlyDone, [&] {
        return ranks.comm->start_all_gather(plan.results[b].narrow(0, 0, ranks.size * round.most), results);
      });
    }
  };
  const auto step = [&](size_t r) {
    if (const auto& arriving = from_home[r % num_buffers]) exchanging(kPartlyDone, [&] { arriving->wait(); });
    const MuonRound& round = plan.rounds[r];
    for (int32_t i = round.first; i < round.first + round.number; ++i) {
      if (plan.steps[i].state[kPlaceOfRowMeans].data == nullptr) continue;
      normalize_rows(plan.steps[i], plan.args[i], ranks.device, job.grad_scaling_on_device);
    }
    StepJob pass = pass_of(round, RuleKind::kMuonStep, steps);
    pass.grad_scaling = {};  // The first pass has scaled the gradients.
    pass.only_skips = true;
    run(pass);
  };
  // Exchanges take place while the next round is computed.
  const size_t ahead = hold_rows ? 1 : 0, behind = ranks.comm ? 1 : 0;
  if (ahead > 0 && num_rounds > 0) begin(0);
  for (size_t r = 0; r < num_rounds + behind; ++r) {
    if (r + ahead < num_rounds) begin(r + ahead);
    if (r < num_rounds) orthogonalize_mine(r);
    if (r >= behind) step(r - behind);
  }
}

void run_muon_cpu(MuonPlan& plan, const StepJob& shared) {
  std::vector<RuleArgs> rules;
  for (size_t i = 0; i < plan.order.size(); ++i) {
    MuonArgs args = shared.rules[shared.params[plan.order[i]].rule].as<MuonArgs>();
    args.fit(plan.steps[i].rows, plan.steps[i].columns);
    rules.push_back(RuleArgs::of(args));
  }
  StepJob job = shared;
  job.rules = rules.data();
  job.num_rules = static_cast<int32_t>(rules.size());
  run_muon(plan, job, plan.momenta.data(), plan.steps.data(),
           [](const StepJob& pass) { run_step_cpu(pass, 0, pass.total); });
}

}  // namespace drivetrain::optim
