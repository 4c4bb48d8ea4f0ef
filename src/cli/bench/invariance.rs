//! `kvasir bench invariance`: what batch invariance costs, as the time of a decode step's products and attention beside
//! the fastest that kernels which look at the batch could choose.
//!
//! Three freedoms are given up so that a request's result does not depend on who else is in the batch, and each is
//! measured against having it: cutting a product's inner dimension where rows are few, taking the precision class that is
//! faster for this number of rows, and one running softmax instead of partial results over fixed ranges of keys. Cut
//! products are measured without the pass that would add their parts, so the free side is flattered and the cost an upper
//! bound. Candidates take turns, since work beside the bench that slowed one of them alone would look like a gain.

use crate::cli::error::{CliError, CliResult, Exit};
use crate::cli::{out, session};
use crate::config::EngineArgs;
use crate::engine::loader;
use crate::gpu::Gpu;
use crate::kernels::attention::Shape;
use crate::kernels::attention_work::Take;
use crate::kernels::kv_layout::KvFormat;
use crate::kernels::matmul::Precision;
use crate::kernels::measure::{self, attention::Case};
use crate::kernels::weights::WeightError;
use serde_json::json;
use std::time::Duration;

#[derive(Clone, Debug, clap::Args)]
pub struct InvarianceArgs {
    /// Rows that decode together, one line for each number
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1, 4, 16], value_parser = clap::value_parser!(u32).range(1..=64))]
    pub rows: Vec<u32>,
    /// Tokens before the one that is computed
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=16384))]
    pub context: u32,
    /// Time for each figure in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 100, value_parser = clap::value_parser!(u64).range(10..))]
    pub budget: u64,
    /// Print one JSON list
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// Layers of SmolLM2-135M.
const NUM_LAYERS: f64 = 30.0;

/// Microseconds of a decode step of SmolLM2-135M.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Cost {
    rows: u32,
    products: f64,
    /// The fastest that a free choice could take.
    free_products: f64,
    attention: f64,
    free_attention: f64,
}

impl Cost {
    fn percent(&self) -> f64 {
        let free = self.free_products + self.free_attention;
        100.0 * (self.products + self.attention - free) / free
    }
}

pub fn run(args: &InvarianceArgs) -> CliResult {
    let options = args.engine.resolve(&session::config()?.engine, std::path::Path::new(""), None)?;
    let gpu = Gpu::open(&loader::gpu_request(&options)).map_err(loader::LoadFailure::from).map_err(CliError::from)?;
    let budget = Duration::from_millis(args.budget);
    let mut costs = Vec::new();
    for &rows in &args.rows {
        let (products, free_products) = products(&gpu, rows, budget).map_err(|e| CliError::failure(e.to_string()))?;
        let (attention, free_attention) = attention(&gpu, rows, args.context, budget)?;
        costs.push(Cost { rows, products, free_products, attention, free_attention });
    }
    if args.json {
        let list: Vec<_> = costs
            .iter()
            .map(|c| {
                json!({ "rows": c.rows, "context": args.context, "products_us": c.products,
                        "free_products_us": c.free_products, "attention_us": c.attention,
                        "free_attention_us": c.free_attention, "cost_percent": c.percent() })
            })
            .collect();
        out::json(&list.into())?;
        return Ok(Exit::Ok);
    }
    let heading = ["rows", "products, us", "if free", "attention, us", "if free", "cost of invariance"];
    let mut rows = vec![heading.map(String::from).to_vec()];
    rows.extend(costs.iter().map(|c| {
        let us = [c.products, c.free_products, c.attention, c.free_attention].map(|us| format!("{us:.0}"));
        let mut row = vec![c.rows.to_string()];
        row.extend(us);
        row.push(format!("at most {:.1} %", c.percent()));
        row
    }));
    out::text(&out::table(&rows))?;
    Ok(Exit::Ok)
}

/// Products of a step of SmolLM2-135M (Q4_1): as they are run, and with the fastest of the free choices for each.
fn products(gpu: &Gpu, rows: u32, budget: Duration) -> Result<(f64, f64), WeightError> {
    let (mut fixed, mut free) = (0.0, 0.0);
    for shape in measure::smollm2_shapes(rows) {
        let times = if shape.n > 10_000 { 1.0 } else { NUM_LAYERS };
        let mut candidates = vec![shape, measure::Shape { precision: Precision::F32, ..shape }];
        // As many workgroups more as the inner dimension is cut into; whole groups of 32 weights stay together.
        candidates.extend(
            [2, 3, 4].into_iter().filter(|parts| shape.k.is_multiple_of(32 * parts)).map(|parts| measure::Shape {
                n: shape.n * parts,
                k: shape.k / parts,
                ..shape
            }),
        );
        let us = in_turns(&candidates, |&shape| measure::product(gpu, shape, budget).map(|m| m.us))?;
        fixed += times * us[0];
        free += times * us.iter().copied().fold(f64::INFINITY, f64::min);
    }
    Ok((fixed, free))
}

/// The best time of each candidate over three rounds.
fn in_turns<T, E>(candidates: &[T], mut us: impl FnMut(&T) -> Result<f64, E>) -> Result<Vec<f64>, E> {
    let mut best = vec![f64::INFINITY; candidates.len()];
    for _ in 0..3 {
        for (best, candidate) in best.iter_mut().zip(candidates) {
            *best = best.min(us(candidate)?);
        }
    }
    Ok(best)
}

/// Attention of a step: partial results over ranges of 256 keys, and one running softmax; each whole or split as is faster.
fn attention(gpu: &Gpu, rows: u32, context: u32, budget: Duration) -> Result<(f64, f64), CliError> {
    let shape =
        Shape { num_heads: 9, num_kv_heads: 3, head_dim: 64, kv: KvFormat::F16, softcap: None, has_sinks: false };
    let case = |split| Case {
        shape,
        rows,
        context,
        shared: 0,
        split,
        share: Take::Never,
        parallel: 2,
        block_size: 16,
        is_contiguous: false,
    };
    let us = in_turns(&[(false, Take::Never), (false, Take::Always), (true, Take::Never)], |&(is_free, split)| {
        let measure = if is_free { measure::attention::with_one_range } else { measure::attention::attention };
        measure(gpu, &case(split), budget).map(|m| m.us)
    })
    .map_err(|e| CliError::from(loader::LoadFailure::from(e)))?;
    let now = us[0].min(us[1]);
    Ok((NUM_LAYERS * now, NUM_LAYERS * now.min(us[2])))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cost_is_what_the_fixed_order_adds() {
        let cost = Cost { rows: 1, products: 210.0, free_products: 200.0, attention: 105.0, free_attention: 100.0 };
        assert!((cost.percent() - 5.0).abs() < 1e-9);
    }
}
