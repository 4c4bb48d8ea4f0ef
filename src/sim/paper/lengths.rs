//! The lengths of prompts and outputs, named before anything is measured.
//!
//! The paper gives the means only. The spread of the ShareGPT outputs follows from one of its own figures: Orca (Max)
//! holds 7 requests of 2,048 positions in 15.7K slots, of which 20.4 % are in use, which is 457 tokens a request; with a
//! prompt of 161 tokens that makes E[output²] / E[output] = 592, a coefficient of variation of 0.87, and a sigma of 0.75.
//! The other spreads are plain guesses.

use crate::sim::rng::Rng;

/// Longest prompt and output together: the context of OPT.
pub const MAX_LEN: u32 = 2048;

/// A log-normal distribution of whole numbers from 1 up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogNormal {
    pub median: f64,
    pub sigma: f64,
}

impl LogNormal {
    fn draw(&self, rng: &mut Rng) -> u32 {
        let length = (self.median.ln() + self.sigma * normal(rng)).exp().round();
        length.clamp(1.0, f64::from(u32::MAX)) as u32
    }
}

/// Lengths of one data set. A pair longer than [`MAX_LEN`] is drawn again; the medians make the means come out as the
/// paper's after that.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Workload {
    pub name: &'static str,
    pub prompt: LogNormal,
    pub output: LogNormal,
    /// What the draws come to: the paper's means.
    pub mean_prompt: f64,
    pub mean_output: f64,
}

/// Conversations with ChatGPT.
pub const SHAREGPT: Workload = Workload {
    name: "ShareGPT-like",
    prompt: LogNormal { median: 101.35, sigma: 1.0 },
    output: LogNormal { median: 261.95, sigma: 0.75 },
    mean_prompt: 161.0,
    mean_output: 338.0,
};

/// Short instructions.
pub const ALPACA: Workload = Workload {
    name: "Alpaca-like",
    prompt: LogNormal { median: 16.13, sigma: 0.6 },
    output: LogNormal { median: 38.94, sigma: 0.9 },
    mean_prompt: 19.0,
    mean_output: 58.0,
};

/// Tokens of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lengths {
    pub prompt: u32,
    pub output: u32,
}

impl Lengths {
    pub fn total(&self) -> u32 {
        self.prompt + self.output
    }
}

impl Workload {
    pub fn draw(&self, rng: &mut Rng) -> Lengths {
        loop {
            let lengths = Lengths { prompt: self.prompt.draw(rng), output: self.output.draw(rng) };
            if lengths.prompt.saturating_add(lengths.output) <= MAX_LEN {
                return lengths;
            }
        }
    }

    pub fn draw_many(&self, count: usize, rng: &mut Rng) -> Vec<Lengths> {
        (0..count).map(|_| self.draw(rng)).collect()
    }

    /// The distribution in words.
    pub fn describe(&self) -> String {
        format!(
            "{}: prompt log-normal (median {:.0}, sigma {}), output log-normal (median {:.0}, sigma {}), together at \
             most {MAX_LEN}; means {:.0} and {:.0} tokens",
            self.name,
            self.prompt.median,
            self.prompt.sigma,
            self.output.median,
            self.output.sigma,
            self.mean_prompt,
            self.mean_output
        )
    }
}

/// Evenly in (0, 1].
pub fn unit(rng: &mut Rng) -> f64 {
    ((rng.next() >> 11) + 1) as f64 / (1u64 << 53) as f64
}

/// Standard normal (Box and Muller).
fn normal(rng: &mut Rng) -> f64 {
    (-2.0 * unit(rng).ln()).sqrt() * (std::f64::consts::TAU * unit(rng)).cos()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_have_the_means_of_the_paper() {
        for workload in [SHAREGPT, ALPACA] {
            let mut rng = Rng::new(3);
            let draws = workload.draw_many(100_000, &mut rng);
            let mean = |f: fn(&Lengths) -> u32| draws.iter().map(|l| f64::from(f(l))).sum::<f64>() / draws.len() as f64;
            let (prompt, output) = (mean(|l| l.prompt), mean(|l| l.output));
            assert!((prompt / workload.mean_prompt - 1.0).abs() < 0.03, "{}: prompt {prompt}", workload.name);
            assert!((output / workload.mean_output - 1.0).abs() < 0.03, "{}: output {output}", workload.name);
            assert!(draws.iter().all(|l| l.prompt >= 1 && l.output >= 1 && l.total() <= MAX_LEN));
        }
    }
}
