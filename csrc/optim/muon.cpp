// Deals Muon's matrices to ranks and runs them in rounds: momentum, Newton-Schulz at home, exchange, step; see muon.h.
#include "optim/muon.h"

#include <ATen/ops/empty.h>

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
    costs.push_back(args[i].iterations * static_cast<double>(wholes[i].numel) *
                    std::min(rows, static_cast<double>(wholes[i].columns)));
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

at::Tensor empty_matrices(c10::Device device, int64_t numel) {
  return at::empty({numel}, at::TensorOptions(at::kBFloat16).device(device));
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

// Runs a part of an exchange. The steps before it have changed parameters, which its error says.
template <class Part>
auto exchanging(Part&& part) {
  try {
    return part();
  } catch (const std::exception& error) {
    throw EnvironmentError(text("Muon could not exchange matrices with the other ranks of its process group: ",
                                error.what(), "\nThis step has updated some parameters only: load a checkpoint."));
  }
}

}  // namespace

MuonPlan plan_muon(c10::Device device, const ParamJob* params, const std::vector<MuonArgs>& args, MuonRanks ranks) {
  MuonPlan plan;
  const int size = ranks.size;
  std::vector<ParamJob> wholes(params, params + args.size());
  for (size_t i = 0; ranks.hold_rows() && i < wholes.size(); ++i) {
    DT_INVARIANT(!wholes[i].is_transposed && wholes[i].rows == rows_of_rank(ranks.whole_rows[i], ranks.rank, size));
    wholes[i].rows = ranks.whole_rows[i];
    wholes[i].numel = wholes[i].rows * wholes[i].columns;
  }
  int64_t largest = 0;
  for (size_t i = 0; i < wholes.size(); ++i) {
    largest = std::max(largest, wholes[i].numel);
    const auto args_of_iteration = args[i].iteration();
    plan.hash = mix(mix(plan.hash, wholes[i].rows), wholes[i].columns << 1 | wholes[i].is_transposed);
    plan.hash = mix(plan.hash, hash_bytes(args_of_iteration.data(), sizeof(args_of_iteration)));
  }
  const int64_t most = std::max(largest, std::min(kRoundElements, kAllElements / size));

  // Divides each home's matrices, sorted by their keys, into rounds.
  std::vector<std::vector<std::vector<int32_t>>> rounds;  // indices by round and home
  std::vector<int64_t> largest_parts;                     // elements at the home that has most of a round
  std::vector<std::vector<int32_t>> homes = deal(wholes, args, size);
  for (int home = 0; home < size; ++home) {
    const auto key = [&](int32_t i) { return key_of(wholes[i], args[i]); };
    std::sort(homes[home].begin(), homes[home].end(),
              [&](int32_t a, int32_t b) { return std::tuple(key(a), a) < std::tuple(key(b), b); });
    size_t round = 0;
    int64_t elements = 0;
    for (const int32_t i : homes[home]) {
      if (elements + wholes[i].numel > most) {
        ++round;
        elements = 0;
      }
      elements += wholes[i].numel;
      if (round == rounds.size()) {
        rounds.emplace_back(size);
        largest_parts.push_back(0);
      }
      rounds[round][home].push_back(i);
      largest_parts[round] = std::max(largest_parts[round], elements);
    }
  }

  const int64_t most_elements =
      largest_parts.empty() ? 0 : *std::max_element(largest_parts.begin(), largest_parts.end());

  // Rounds that exchange rows begin while the one before is orthogonalized and the one before that returns.
  const bool hold_rows = ranks.hold_rows();
  const size_t most_buffers = hold_rows ? 3 : std::min(size, 2);
  int64_t most_local = 0;
  for (const auto& of_round : rounds) {
    int64_t local = 0;
    for (const auto& of_home : of_round) {
      for (const int32_t i : of_home) local += params[i].numel;
    }
    most_local = std::max(most_local, local);
  }
  for (size_t i = 0; i < std::min(most_buffers, rounds.size()); ++i) {
    plan.results.push_back(empty_matrices(device, hold_rows ? most_local : size * most_elements));
    if (hold_rows) plan.messages.push_back(empty_matrices(device, most_elements));
  }
  plan.scratch = empty_matrices(device, most_elements);
  if (hold_rows) plan.wholes = empty_matrices(device, most_elements);

  for (size_t r = 0; r < rounds.size(); ++r) {
    MuonRound& round = plan.rounds.emplace_back();
    round.first = static_cast<int32_t>(plan.order.size());
    round.most = largest_parts[r];
    round.sent.resize(size);
    round.back.resize(size);
    const at::Tensor& results = plan.results[r % plan.results.size()];
    int64_t local = 0;
    for (int home = 0; home < size; ++home) {
      int64_t begin = 0;
      const int32_t* before = nullptr;
      for (const int32_t& i : rounds[r][home]) {
        const bool is_mine = home == ranks.rank;
        if (is_mine) {
          const auto [rows, columns] = std::get<0>(key_of(wholes[i], args[i]));
          if (before == nullptr || key_of(wholes[*before], args[*before]) != key_of(wholes[i], args[i])) {
            round.mine.push_back({0, rows, columns, wholes[i].is_transposed, begin, args[i]});
          }
          ++round.mine.back().number;
          for (int rank = 0; hold_rows && rank < size; ++rank) {
            round.back[rank] += rows_of_rank(rows, rank, size) * columns * kElementBytes;
          }
        }
        before = &i;
        ParamJob job = params[i];
        job.rule = static_cast<int32_t>(plan.order.size());
        job.rows = wholes[i].rows;
        job.begin = num_blocks(round.total) * kBlock;  // States may have blocks.
        round.total = job.begin + job.numel;
        round.sent[home] += job.numel * kElementBytes;
        const TypedArray result = values_in(results, hold_rows ? local : home * round.most + begin);
        plan.order.push_back(i);
        plan.momenta.push_back(job);
        // Other homes' places only take the momentum until their results arrive.
        const bool begins_elsewhere = is_mine && !hold_rows && !begins_with_result(args[i]);
        plan.momenta.back().param = begins_elsewhere ? values_in(plan.scratch, begin) : result;
        plan.steps.push_back(job);
        plan.steps.back().grad = result;
        ++round.number;
        begin += wholes[i].numel;
        local += job.numel;
      }
    }
  }
  plan.ranks = std::move(ranks);
  return plan;
}

void check_plans(const MuonPlan& plan, c10::Device device, uint64_t& agreed) {
  if (!plan.ranks.comm || (device.is_cuda() && plan.hash == agreed)) return;
  const at::Tensor here = at::empty({2}, at::kLong),
                   all = at::empty({plan.ranks.size, 2}, here.options().device(device));
  here.data_ptr<int64_t>()[0] = static_cast<int64_t>(plan.hash);
  here.data_ptr<int64_t>()[1] = static_cast<int64_t>(plan.order.size());
  plan.ranks.comm->start_all_gather(all, here.to(device))->wait();
  const at::Tensor found = all.cpu();
  for (int rank = 0; rank < plan.ranks.size; ++rank) {
    const int64_t* theirs = found.const_data_ptr<int64_t>() + 2 * rank;
    if (theirs[0] == static_cast<int64_t>(plan.hash)) continue;
    throw UserError(text("Muon with process_group deals matrices to ranks, but ", plan.ranks.comm->ranks().name(rank),
                         " steps ", theirs[1], " matrices and ", plan.ranks.comm->ranks().name(plan.ranks.rank), " ",
                         plan.order.size(),
                         " (or other shapes or options). Every rank must step the same matrices: "
                         "give all of them gradients on every rank, or leave process_group out."));
  }
  agreed = plan.hash;
}

void run_muon(MuonPlan& plan, const StepJob& job, const ParamJob* momenta, const ParamJob* steps,
              const std::function<void(const StepJob&)>& run) {
  const MuonRanks& ranks = plan.ranks;
  const bool hold_rows = ranks.hold_rows();
  const size_t num_rounds = plan.rounds.size(), num_buffers = plan.results.size();
  std::vector<std::unique_ptr<ddp::TorchReduce>> there(num_buffers), back(num_buffers);
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
    there[b] = exchanging([&] {
      return ranks.comm->start_all_to_all(bytes_of(plan.messages[b], round.back), bytes_of(plan.results[b], round.sent),
                                          round.back, round.sent);
    });
  };
  const auto orthogonalize_mine = [&](size_t r) {
    const MuonRound& round = plan.rounds[r];
    const size_t b = r % num_buffers;
    const at::Tensor results = hold_rows ? plan.wholes : plan.results[b].narrow(0, ranks.rank * round.most, round.most);
    if (hold_rows) {
      exchanging([&] { there[b]->wait(); });
      copy_rows(round, plan.wholes, plan.scratch, plan.messages[b], ranks.size, /*is_result=*/false);
    }
    for (const MuonMatrices& matrices : round.mine) orthogonalize_heads(matrices, results, plan.scratch);
    if (hold_rows) {
      copy_rows(round, plan.wholes, plan.scratch, plan.messages[b], ranks.size, /*is_result=*/true);
      back[b] = exchanging([&] {
        return ranks.comm->start_all_to_all(bytes_of(plan.results[b], round.sent),
                                            bytes_of(plan.messages[b], round.back), round.sent, round.back);
      });
    } else if (ranks.comm) {
      back[b] = exchanging(
          [&] { return ranks.comm->start_all_gather(plan.results[b].narrow(0, 0, ranks.size * round.most), results); });
    }
  };
  const auto step = [&](size_t r) {
    if (const auto& arriving = back[r % num_buffers]) exchanging([&] { arriving->wait(); });
    StepJob pass = pass_of(plan.rounds[r], RuleKind::kMuonStep, steps);
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
