//! `kvasir bench kernels`: how fast single kernels are on this adapter, with made-up data: no model is needed.

use crate::cli::error::{CliError, CliResult, Exit};
use crate::cli::{out, session};
use crate::config::EngineArgs;
use crate::engine::loader;
use crate::gpu::Gpu;
use crate::kernels::attention::Shape;
use crate::kernels::attention_work::Take;
use crate::kernels::kv_layout::KvFormat;
use crate::kernels::measure::{self, attention::Case};
use serde_json::{Value, json};
use std::time::Duration;

#[derive(Clone, Debug, clap::Args)]
pub struct KernelsArgs {
    /// Measure only kernels whose name holds this text
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub only: String,
    /// Time for each figure in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(10..))]
    pub budget: u64,
    /// Print one JSON list
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// One line of the result.
struct Figure {
    kernel: &'static str,
    variant: String,
    shape: String,
    us: f64,
    gb_s: f64,
    gflop_s: Option<f64>,
}

pub fn run(args: &KernelsArgs) -> CliResult {
    let options = args.engine.resolve(&session::config()?.engine, std::path::Path::new(""), None)?;
    let gpu = Gpu::open(&loader::gpu_request(&options)).map_err(loader::LoadFailure::from).map_err(CliError::from)?;
    let budget = Duration::from_millis(args.budget);
    let mut figures = Vec::new();
    if "matmul".contains(&args.only) {
        matmuls(&gpu, budget, &mut figures)?;
    }
    if "attention".contains(&args.only) {
        attentions(&gpu, budget, &mut figures)?;
    }
    if args.json {
        let list: Vec<Value> = figures
            .iter()
            .map(|f| {
                json!({ "kernel": f.kernel, "variant": f.variant, "shape": f.shape, "us": f.us, "gb_s": f.gb_s,
                        "gflop_s": f.gflop_s })
            })
            .collect();
        out::json(&Value::Array(list))?;
    } else {
        let mut rows = vec![["kernel", "variant", "shape", "us", "GB/s", "GFLOP/s"].map(String::from).to_vec()];
        rows.extend(figures.iter().map(|f| {
            vec![
                f.kernel.into(),
                f.variant.clone(),
                f.shape.clone(),
                format!("{:.0}", f.us),
                format!("{:.2}", f.gb_s),
                f.gflop_s.map_or_else(String::new, |g| format!("{g:.1}")),
            ]
        }));
        out::text(&out::table(&rows))?;
    }
    Ok(Exit::Ok)
}

fn matmuls(gpu: &Gpu, budget: Duration, figures: &mut Vec<Figure>) -> Result<(), CliError> {
    for m in [1, 16, 64] {
        for shape in measure::smollm2_shapes(m) {
            let measured = measure::product(gpu, shape, budget).map_err(|e| CliError::failure(e.to_string()))?;
            figures.push(Figure {
                kernel: "matmul",
                variant: format!("{:?}", shape.dtype),
                shape: format!("{} x {} x {}", shape.m, shape.n, shape.k),
                us: measured.us,
                gb_s: measured.weight_gb_per_s,
                gflop_s: Some(measured.gflops),
            });
        }
    }
    Ok(())
}

/// (rows, context, shared): one stream, and chats on one system prompt.
const ATTENTION: [(u32, u32, u32); 7] =
    [(1, 64, 0), (1, 1024, 0), (1, 4096, 0), (8, 1152, 1024), (32, 1152, 1024), (8, 2176, 2048), (32, 2176, 2048)];

fn attentions(gpu: &Gpu, budget: Duration, figures: &mut Vec<Figure>) -> Result<(), CliError> {
    let shape =
        Shape { num_heads: 9, num_kv_heads: 3, head_dim: 64, kv: KvFormat::F16, softcap: None, has_sinks: false };
    for (rows, context, shared) in ATTENTION {
        let ways = [("whole", Take::Never, Take::Never), ("split", Take::Always, Take::Never)];
        let shares = [("shared prefix", Take::Never, Take::Always)];
        for &(variant, split, share) in ways.iter().chain(shares.iter().filter(|_| shared > 0)) {
            let case = Case { shape, rows, context, shared, split, share, parallel: 2 };
            let measured = measure::attention::attention(gpu, &case, budget)
                .map_err(loader::LoadFailure::from)
                .map_err(CliError::from)?;
            figures.push(Figure {
                kernel: "attention",
                variant: variant.into(),
                shape: format!("{rows} rows at {context}, {shared} shared"),
                us: measured.us,
                gb_s: measured.kv_gb_per_s,
                gflop_s: None,
            });
        }
    }
    Ok(())
}
