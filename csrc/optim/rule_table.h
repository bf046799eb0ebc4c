// Declares the table of native rules by name, with the properties that the reader needs.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "optim/precision.h"
#include "optim/step.h"
#include "optim/trust_ratio.h"

namespace drivetrain::optim {

struct RuleInfo {
  const char* name;
  RuleKind kind;
  bool counts_steps;  // the state holds a tensor "step"
  RuleArgs (*make_args)(const Hypers& hypers, double step, const Scalars& scalars);
  void (*advance)(const Hypers& hypers, double step, Scalars& scalars);  // null for rules without scalars
  Adapt adapt;                                                           // null for rules without a trust ratio
  enum class Needs : uint8_t {
    kNothing,
    kMatrix,
    kRealRowByRow
  } needs;  // requirements on a parameter's shape and memory
  struct State {
    PyObject* name;  // interned and never freed, like the other names
    // Names of an 8-bit state. They differ from torch's name, so that torch's class does not take codes for values.
    PyObject* codes_name;
    PyObject* scales_name;
    StateKind kind;
    bool of_all_shapes;  // if false, see state_sizes()
  };
  std::vector<State> states;
  std::vector<PyObject*> scalars;  // interned names, in the order of Scalars
};

const std::vector<RuleInfo>& all_rules();

// Finds a rule by its name in DT_OPTIM_RULES. Throws UserError if there is none.
const RuleInfo& find_rule(const std::string& name);

}  // namespace drivetrain::optim
