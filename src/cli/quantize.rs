//! `kvasir quantize`: a folder's weights in 4 or 8 bits, and what that costs.

use super::args::ModelArgs;
use super::error::{CliError, CliResult, Exit};
use super::{eval, interrupt, out, session};
use crate::config::EngineArgs;
use crate::engine::loader::LoadFailure;
use crate::engine::logits::{LogitsPlan, all_logits};
use crate::executor::reference_executor::{ReferenceConfig, ReferenceExecutor};
use crate::model::Model;
use crate::model::groups::LayerGroups;
use crate::model::quantise::{Importances, Recipe, Written, quantise_folder};
use serde_json::json;
use std::path::{Path, PathBuf};

/// Tokens in a block of the CPU's pool.
const BLOCK_SIZE: u32 = 16;

#[derive(Clone, Debug, clap::Args)]
pub struct QuantizeArgs {
    /// A Hugging Face folder with unquantised weights
    #[arg(value_name = "FOLDER")]
    pub folder: PathBuf,
    /// The folder to be written; it must not exist
    #[arg(value_name = "OUT")]
    pub out: PathBuf,
    /// Bits of a weight: 4 (with zero points) or 8 (symmetric)
    #[arg(long, value_name = "N", default_value = "4", value_parser = clap::builder::PossibleValuesParser::new(["4", "8"]))]
    pub bits: String,
    /// Inputs that share a scale: 32, 64 or 128
    #[arg(long, value_name = "N", default_value = "32", value_parser = clap::builder::PossibleValuesParser::new(["32", "64", "128"]))]
    pub group_size: String,
    /// Text by which scales are searched for instead of rounding to nearest; the model reads it on the CPU
    #[arg(long, value_name = "FILE")]
    pub calibrate: Option<PathBuf>,
    /// Tokens of that text that are read
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub calibration_tokens: u32,
    /// Report the perplexity of this text before and after
    #[arg(long, value_name = "FILE")]
    pub text: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub engine: EngineArgs,
}

pub fn run(args: &QuantizeArgs) -> CliResult {
    let number = |text: &str| text.parse::<u32>().expect("one of the possible values");
    let recipe = Recipe { bits: number(&args.bits), group: number(&args.group_size) };
    if args.out.exists() {
        return Err(CliError::usage(format!("OUT: the folder exists already: {}", args.out.display())));
    }
    let before = args.text.as_deref().map(|text| perplexity(args, &args.folder, text)).transpose()?;
    let model = Model::open(&args.folder).map_err(LoadFailure::from)?;
    let importances = match &args.calibrate {
        Some(text) => calibrate(&model, args, text)?,
        None => Importances::new(),
    };
    let mut progress = session::Progress::default();
    let written = quantise_folder(&model, &args.out, recipe, &importances, &mut |done, total| {
        progress.show("Quantising", done, total);
        interrupt::presses() == 0
    });
    progress.clear();
    interrupt::check()?;
    let written = written.map_err(LoadFailure::from)?;
    // What was written is read again, so that a fault shows here and not at the next start.
    Model::open(&args.out).map_err(LoadFailure::from)?.verify_finite().map_err(LoadFailure::from)?;
    let after = args.text.as_deref().map(|text| perplexity(args, &args.out, text)).transpose()?;
    report(args, &written, before.zip(after))
}

fn report(args: &QuantizeArgs, written: &Written, perplexities: Option<(f64, f64)>) -> CliResult {
    let Written { num_quantised, kept, bytes_before, bytes_after } = written;
    if args.json {
        out::json(&json!({
            "path": args.out, "quantised": num_quantised, "kept": kept, "bytes_before": bytes_before,
            "bytes_after": bytes_after, "ppl_before": perplexities.map(|p| p.0), "ppl_after": perplexities.map(|p| p.1),
        }))?;
        return Ok(Exit::Ok);
    }
    out::line(&format!(
        "{num_quantised} matrices in {} bits, {} kept; {} instead of {}: {}",
        args.bits,
        kept.len(),
        out::bytes(*bytes_after),
        out::bytes(*bytes_before),
        args.out.display()
    ))?;
    if let Some((before, after)) = perplexities {
        out::line(&format!("perplexity {after:.4} instead of {before:.4}"))?;
    }
    Ok(Exit::Ok)
}

fn model_args(args: &QuantizeArgs, folder: &Path) -> ModelArgs {
    ModelArgs { model: Some(folder.to_string_lossy().into_owned()), lora: None, engine: args.engine.clone() }
}

fn perplexity(args: &QuantizeArgs, folder: &Path, text: &Path) -> Result<f64, CliError> {
    let (_, mean) = eval::mean_nll(&model_args(args, folder), text, None)?;
    Ok(mean.exp())
}

/// Mean squares of what each projection reads over the text.
fn calibrate(model: &Model, args: &QuantizeArgs, text: &Path) -> Result<Importances, CliError> {
    let mut tokens = eval::tokens_of(text, &model_args(args, &args.folder))?;
    tokens.truncate(args.calibration_tokens.min(model.spec().max_position) as usize);
    let plan = LogitsPlan { chunk: Some(BLOCK_SIZE), is_batched: false, max_tokens_per_step: BLOCK_SIZE };
    let prompts = [tokens];
    let needs = plan.needs(&prompts, BLOCK_SIZE, LayerGroups::of(model.spec()).num_groups());
    let config = ReferenceConfig { num_blocks: needs.num_blocks, block_size: BLOCK_SIZE };
    let failed = |e: &dyn std::fmt::Display| CliError::failure(format!("calibration failed: {e}"));
    let mut executor = ReferenceExecutor::new(model, config).map_err(|e| failed(&e))?;
    executor.watch_inputs();
    let total = prompts[0].len() as u64;
    let mut progress = session::Progress::default();
    all_logits(&mut executor, &prompts, plan, &mut |_, first, _| {
        progress.show("Reading the calibration text", first as u64, total);
    })
    .map_err(|e| failed(&e))?;
    progress.clear();
    let mean = |sums: Vec<f64>| -> Vec<f32> {
        let most = sums.iter().copied().fold(0.0, f64::max);
        // An input that was never seen still counts a little.
        sums.iter().map(|sum| ((sum + 1e-6 * most) / total as f64) as f32).collect()
    };
    Ok(executor.input_squares().into_iter().map(|(role, sums)| (role, mean(sums))).collect())
}
