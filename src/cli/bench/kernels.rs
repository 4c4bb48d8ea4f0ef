//! `kvasir bench kernels`: how fast single kernels are on this adapter, with made-up data: no model is needed.

use super::tune_report;
use crate::cli::error::{CliError, CliResult, Exit};
use crate::cli::{out, session};
use crate::config::EngineArgs;
use crate::engine::loader;
use crate::gpu::Gpu;
use crate::kernels::attention::Shape;
use crate::kernels::attention_work::Take;
use crate::kernels::kv_layout::KvFormat;
use crate::kernels::measure::{self, attention::Case, peaks::Peaks};
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
    /// Try each way to compute SmolLM2's products that gives the same bits, and tell times, choice and bans; `--only`
    /// names products
    #[arg(long)]
    pub tune_report: bool,
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
    /// GFLOP/s that products of so many tokens are held to.
    floor: Option<f64>,
}

/// What separate kernels reached at SmolLM2's shapes on lavapipe of Mesa 22.3.6 with two cores: (tokens, GFLOP/s) of 4-bit
/// weights with their scales and int8 activations. A yardstick on software adapters: other machines have other cores.
const FLOORS: [(u32, f64); 3] = [(1, 10.2), (16, 39.0), (64, 41.0)];

impl Figure {
    /// Share of the floor, in percent.
    fn percent_of_floor(&self) -> Option<f64> {
        Some(100.0 * self.gflop_s? / self.floor?)
    }

    /// Shares of what was measured at best, in percent.
    fn percent(&self, peaks: &Peaks) -> (f64, Option<f64>) {
        (100.0 * self.gb_s / peaks.stream_gb_per_s, self.gflop_s.map(|g| 100.0 * g / peaks.fma_gflops))
    }
}

pub fn run(args: &KernelsArgs) -> CliResult {
    let options = args.engine.resolve(&session::config()?.engine, std::path::Path::new(""), None)?;
    let gpu = Gpu::open(&loader::gpu_request(&options)).map_err(loader::LoadFailure::from).map_err(CliError::from)?;
    if args.tune_report {
        return tune_report::run(&gpu, &args.only, args.json);
    }
    let budget = Duration::from_millis(args.budget);
    let peaks = measure::peaks::peaks(&gpu, budget).map_err(loader::LoadFailure::from).map_err(CliError::from)?;
    let mut figures = Vec::new();
    if "matmul".contains(&args.only) {
        matmuls(&gpu, budget, &mut figures)?;
    }
    if "attention".contains(&args.only) {
        attentions(&gpu, budget, &mut figures)?;
    }
    if args.json {
        out::json(&Value::Array(figures.iter().map(|f| json_of(f, &peaks)).collect()))?;
    } else {
        out::text(&text_of(&figures, &peaks))?;
    }
    Ok(Exit::Ok)
}

fn json_of(figure: &Figure, peaks: &Peaks) -> Value {
    let (pct_bw, pct_fma) = figure.percent(peaks);
    json!({ "kernel": figure.kernel, "variant": figure.variant, "shape": figure.shape, "us": figure.us,
            "gb_s": figure.gb_s, "gflop_s": figure.gflop_s, "pct_bw": pct_bw, "pct_fma": pct_fma,
            "pct_floor": figure.percent_of_floor() })
}

fn text_of(figures: &[Figure], peaks: &Peaks) -> String {
    let header = ["kernel", "variant", "shape", "us", "GB/s", "% of copy", "GFLOP/s", "% of FMA", "% of floor"];
    let mut rows = vec![header.map(String::from).to_vec()];
    rows.extend(figures.iter().map(|f| {
        let (pct_bw, pct_fma) = f.percent(peaks);
        vec![
            f.kernel.into(),
            f.variant.clone(),
            f.shape.clone(),
            format!("{:.0}", f.us),
            format!("{:.2}", f.gb_s),
            format!("{pct_bw:.0}"),
            f.gflop_s.map_or_else(String::new, |g| format!("{g:.1}")),
            pct_fma.map_or_else(String::new, |p| format!("{p:.0}")),
            f.percent_of_floor().map_or_else(String::new, |p| format!("{p:.0}")),
        ]
    }));
    let mut text = format!(
        "This adapter copies {:.1} GB/s (read and written) and multiplies and adds at {:.1} GFLOP/s. Products of \
         int8 may exceed 100 %: one instruction does several.\n\n",
        peaks.stream_gb_per_s, peaks.fma_gflops
    );
    text += &out::table(&rows);
    let us = |variant: &str| figures.iter().find(|f| f.kernel == "attention" && f.variant == variant).map(|f| f.us);
    if let (Some(pages), Some(contiguous)) = (us("pages"), us("contiguous")) {
        text += &format!("\nPages cost attention {:.2} times what contiguous rows do.\n", pages / contiguous);
    }
    text
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
                floor: FLOORS.iter().find(|(tokens, _)| gpu.caps().is_cpu && *tokens == m).map(|floor| floor.1),
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
    let plain = Case {
        shape,
        rows: 1,
        context: 64,
        shared: 0,
        split: Take::Never,
        share: Take::Never,
        parallel: 2,
        block_size: 16,
        is_contiguous: false,
    };
    for (rows, context, shared) in ATTENTION {
        let ways = [("whole", Take::Never, Take::Never), ("split", Take::Always, Take::Never)];
        let shares = [("shared prefix", Take::Never, Take::Always)];
        for &(variant, split, share) in ways.iter().chain(shares.iter().filter(|_| shared > 0)) {
            figures.push(attention(gpu, budget, variant, &Case { rows, context, shared, split, share, ..plain })?);
        }
    }
    // Sixteen rows, so that every thread has work whatever the number of heads.
    let rows = Case { rows: 16, context: 1023, ..plain };
    let contiguous = Case { block_size: 1024, is_contiguous: true, ..rows };
    let mut best: [Option<Figure>; 2] = [None, None];
    // In turns, since other work on the machine only ever adds.
    for _ in 0..3 {
        for (best, (variant, case)) in best.iter_mut().zip([("pages", &rows), ("contiguous", &contiguous)]) {
            let figure = attention(gpu, budget, variant, case)?;
            if best.as_ref().is_none_or(|best| figure.us < best.us) {
                *best = Some(figure);
            }
        }
    }
    figures.extend(best.into_iter().flatten());
    Ok(())
}

fn attention(gpu: &Gpu, budget: Duration, variant: &str, case: &Case) -> Result<Figure, CliError> {
    let measured = measure::attention::attention(gpu, case, budget);
    let measured = measured.map_err(loader::LoadFailure::from).map_err(CliError::from)?;
    Ok(Figure {
        kernel: "attention",
        variant: variant.into(),
        shape: format!("{} rows at {}, {} shared", case.rows, case.context, case.shared),
        us: measured.us,
        gb_s: measured.kv_gb_per_s,
        gflop_s: None,
        floor: None,
    })
}
