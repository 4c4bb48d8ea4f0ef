//! The rules of drawing a token: parameters, the CPU reference sampler, the stateless random numbers.
