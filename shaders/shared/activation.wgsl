// What stands between an MLP's products. The kernel file declares alias Gate, f32 or vec4<f32>.
//
// Defines: SILU, GELU, GELU_TANH, RELU or CLAMPED_SWIGLU (not with PLAIN); PLAIN.

#ifdef SILU
fn act(x: Gate) -> Gate {
  // exp of more than 88 overflows, and the quotient is zero long before.
  return x / (Gate(1.0) + exp(min(-x, Gate(80.0))));
}
#endif
#ifdef GELU
/// x / 2 * erfc(-x / sqrt(2)); erfc by the Chebyshev fit of Numerical Recipes 6.2, relative error below 1.2e-7.
fn act(x: Gate) -> Gate {
  let u = x * -0.70710678;
  let z = abs(u);
  let t = Gate(1.0) / (Gate(1.0) + 0.5 * z);
  var p = t * 0.17087277 + Gate(-0.82215223);
  p = t * p + Gate(1.48851587);
  p = t * p + Gate(-1.13520398);
  p = t * p + Gate(0.27886807);
  p = t * p + Gate(-0.18628806);
  p = t * p + Gate(0.09678418);
  p = t * p + Gate(0.37409196);
  p = t * p + Gate(1.00002368);
  p = t * p + Gate(-1.26551223);
  let tail = t * exp(max(p - z * z, Gate(-80.0)));
  return 0.5 * x * select(tail, Gate(2.0) - tail, u < Gate(0.0));
}
#endif
#ifdef GELU_TANH
fn act(x: Gate) -> Gate {
  // tanh(u) = 1 - 2 / (exp(2u) + 1), without overflow.
  let u = 0.7978845608 * (x + 0.044715 * x * x * x);
  let e = exp(clamp(2.0 * u, Gate(-80.0), Gate(80.0)));
  return x * (Gate(1.0) - Gate(1.0) / (e + Gate(1.0)));
}
#endif
#ifdef RELU
fn act(x: Gate) -> Gate {
  return max(x, Gate(0.0));
}
#endif
#ifndef PLAIN
/// act(gate) * up; CLAMPED_SWIGLU bounds both and adds 1 to up.
fn gated(gate: Gate, up: Gate) -> Gate {
#ifdef CLAMPED_SWIGLU
  let g = min(gate, Gate(7.0));
  let u = clamp(up, Gate(-7.0), Gate(7.0));
  return g / (Gate(1.0) + exp(min(-1.702 * g, Gate(80.0)))) * (u + Gate(1.0));
#else
  return act(gate) * up;
#endif
}
#endif
