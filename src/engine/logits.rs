//! The logits of every position of given prompts, straight from the executor: for comparing with references.
//!
//! Guarantees: the prompts are computed as the engine computes them, through block tables and steps of bounded size; the
//! rows arrive in order of position within each prompt. It does not attempt prefix hits, sampling or recovery.

use crate::batch::{RowSampling, StepBatch, Want};
use crate::executor::{ExecError, Executor};
use crate::ids::TokenId;

/// Bytes of logits that a step may return.
const MAX_LOGITS_BYTES: usize = 128 << 20;

/// How prompts are cut into steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogitsPlan {
    /// Tokens of a prompt per step; `None` takes as many as a step holds.
    pub chunk: Option<u32>,
    /// All prompts in one batch, instead of one after the other.
    pub is_batched: bool,
    /// Tokens a step may compute.
    pub max_tokens_per_step: u32,
}

/// What a run needs of the executor, so that it can be built to fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogitsNeeds {
    /// The null block included.
    pub num_blocks: u32,
    pub num_rows: u32,
}

impl LogitsPlan {
    /// Rows of logits that a step may return for this vocabulary.
    fn max_rows(&self, vocab_size: usize) -> usize {
        (MAX_LOGITS_BYTES / (4 * vocab_size.max(1))).clamp(1, self.max_tokens_per_step.max(1) as usize)
    }

    /// What a model of so many layer groups needs for these prompts.
    pub fn needs(&self, prompts: &[Vec<TokenId>], block_size: u32, num_groups: u32) -> LogitsNeeds {
        // One more token than the prompt has, so that the pool holds the context that is asked for.
        let blocks = prompts.iter().map(|p| (p.len() as u32 + 1).div_ceil(block_size) * num_groups);
        if self.is_batched {
            LogitsNeeds { num_blocks: 1 + blocks.sum::<u32>(), num_rows: prompts.len().max(1) as u32 }
        } else {
            LogitsNeeds { num_blocks: 1 + blocks.max().unwrap_or(0), num_rows: 1 }
        }
    }
}

/// A prompt on its way through the executor.
struct Row<'a> {
    prompt_idx: usize,
    tokens: &'a [TokenId],
    /// 0 is none.
    adapter: u64,
    first_block: u32,
    num_computed: usize,
}

/// Computes every prompt; `on_rows(prompt, position, logits)` gets f32 `[n, vocab]` for positions from `position` on.
pub fn all_logits(
    executor: &mut dyn Executor,
    prompts: &[Vec<TokenId>],
    plan: LogitsPlan,
    on_rows: &mut dyn FnMut(usize, usize, &[f32]),
) -> Result<u64, ExecError> {
    adapted_logits(executor, prompts, &[], plan, on_rows)
}

/// As [`all_logits`], with the adapter of each prompt; 0 is none, and so is what `adapters` does not name.
pub fn adapted_logits(
    executor: &mut dyn Executor,
    prompts: &[Vec<TokenId>],
    adapters: &[u64],
    plan: LogitsPlan,
    on_rows: &mut dyn FnMut(usize, usize, &[f32]),
) -> Result<u64, ExecError> {
    let (block_size, num_groups) = (executor.block_size(), executor.windows().len() as u32);
    let mut step = 0;
    let mut next_block = 1;
    let mut rows = Vec::new();
    for (prompt_idx, tokens) in prompts.iter().enumerate() {
        let adapter = adapters.get(prompt_idx).copied().unwrap_or(0);
        rows.push(Row { prompt_idx, tokens, adapter, first_block: next_block, num_computed: 0 });
        if plan.is_batched {
            next_block += (tokens.len() as u32).div_ceil(block_size) * num_groups;
        } else {
            run_rows(executor, &mut rows, plan, &mut step, on_rows)?;
            rows.clear();
        }
    }
    run_rows(executor, &mut rows, plan, &mut step, on_rows)?;
    Ok(step)
}

fn run_rows(
    executor: &mut dyn Executor,
    rows: &mut [Row<'_>],
    plan: LogitsPlan,
    step: &mut u64,
    on_rows: &mut dyn FnMut(usize, usize, &[f32]),
) -> Result<(), ExecError> {
    while rows.iter().any(|r| r.num_computed < r.tokens.len()) {
        run_step(executor, rows, plan, *step, on_rows)?;
        *step += 1;
    }
    Ok(())
}

/// One step: the next chunk of each row.
fn run_step(
    executor: &mut dyn Executor,
    rows: &mut [Row<'_>],
    plan: LogitsPlan,
    step: u64,
    on_rows: &mut dyn FnMut(usize, usize, &[f32]),
) -> Result<(), ExecError> {
    let vocab = executor.vocab_size() as usize;
    let (block_size, num_groups) = (executor.block_size(), executor.windows().len() as u32);
    let mut batch = StepBatch { step, block_size, num_groups, want: Want::Logits, ..StepBatch::default() };
    let mut budget = plan.max_rows(vocab);
    let mut spans = Vec::new();
    start_arrays(&mut batch);
    for (row_idx, row) in rows.iter().enumerate() {
        let left = row.tokens.len() - row.num_computed;
        let num_tokens = left.min(plan.chunk.map_or(usize::MAX, |c| c.max(1) as usize)).min(budget);
        if num_tokens > 0 {
            push_row(&mut batch, row_idx, row, num_tokens);
            spans.push((row_idx, num_tokens));
            budget -= num_tokens;
        }
    }
    let handle = executor.launch(&batch)?;
    let output = executor.wait(handle)?;
    let logits = output.logits.ok_or_else(|| ExecError::Rejected("the step returned no logits".into()))?;
    let mut at = 0;
    for (row_idx, num_tokens) in spans {
        let row = &mut rows[row_idx];
        let values = logits
            .get(at..at + num_tokens * vocab)
            .ok_or_else(|| ExecError::Rejected("the step returned too few logits".into()))?;
        on_rows(row.prompt_idx, row.num_computed, values);
        row.num_computed += num_tokens;
        at += num_tokens * vocab;
    }
    Ok(())
}

/// The same prompt on two executors in lockstep; `on_rows(position, a, b)` gets the logits of both for positions from
/// `position` on, f32 `[n, vocab]`. Both have the same vocabulary.
pub fn logits_of_two(
    (a, b): (&mut dyn Executor, &mut dyn Executor),
    prompt: &[TokenId],
    plan: LogitsPlan,
    on_rows: &mut dyn FnMut(usize, &[f32], &[f32]),
) -> Result<(), ExecError> {
    let row = || [Row { prompt_idx: 0, tokens: prompt, adapter: 0, first_block: 1, num_computed: 0 }];
    let (mut of_a, mut of_b) = (row(), row());
    let mut step = 0;
    let mut kept = Vec::new();
    while of_a[0].num_computed < prompt.len() {
        kept.clear();
        run_step(a, &mut of_a, plan, step, &mut |_, _, rows| kept.extend_from_slice(rows))?;
        run_step(b, &mut of_b, plan, step, &mut |_, first, rows| on_rows(first, &kept, rows))?;
        step += 1;
    }
    Ok(())
}

/// The leading zero of every array of starts.
fn start_arrays(batch: &mut StepBatch) {
    batch.row_start.push(0);
    batch.block_table_start.push(0);
    batch.penalty_start.push(0);
    batch.bias_start.push(0);
}

fn push_row(batch: &mut StepBatch, row_idx: usize, row: &Row<'_>, num_tokens: usize) {
    let batch_row = batch.slot_of_row.len() as u32;
    let end = row.num_computed + num_tokens;
    let num_groups = batch.num_groups;
    for position in row.num_computed as u32..end as u32 {
        let first = row.first_block + position / batch.block_size * num_groups;
        let slot = |block: u32| block * batch.block_size + position % batch.block_size;
        batch.kv_slots.extend((first..first + num_groups).map(slot));
        batch.logit_tokens.push(batch.input_ids.len() as u32);
        batch.input_ids.push(row.tokens[position as usize]);
        batch.positions.push(position);
        batch.row_of_token.push(batch_row);
        batch.sampling.push(unsampled(position + 1));
        batch.penalty_start.push(0);
        batch.bias_start.push(0);
    }
    batch.row_start.push(batch.input_ids.len() as u32);
    batch.slot_of_row.push(row_idx as u32);
    batch.set_adapter(row.adapter);
    let num_rows = (end as u32).div_ceil(batch.block_size);
    for group in 0..num_groups {
        batch.block_tables.extend((0..num_rows).map(|i| row.first_block + i * num_groups + group));
        batch.block_table_start.push(batch.block_tables.len() as u32);
    }
}

/// Neutral values: nothing is drawn when logits are wanted.
fn unsampled(position: u32) -> RowSampling {
    RowSampling {
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        repetition_penalty: 1.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        seed: 0,
        position,
        logprobs: None,
        is_beam: false,
    }
}

/// Kullback-Leibler divergence of what `got` says from what `want` says, in nats: one row of logits each, summed in f64.
pub fn kl_divergence(want: &[f32], got: &[f32]) -> f64 {
    let log_sum = |row: &[f32]| {
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        f64::from(max) + row.iter().map(|&x| f64::from(x - max).exp()).sum::<f64>().ln()
    };
    let (of_want, of_got) = (log_sum(want), log_sum(got));
    let terms = want.iter().zip(got).map(|(&w, &g)| {
        let (p, q) = (f64::from(w) - of_want, f64::from(g) - of_got);
        p.exp() * (p - q)
    });
    terms.sum()
}

/// Negative log-likelihood of `target` under one row of logits, natural logarithm, summed in f64.
pub fn nll(row: &[f32], target: TokenId) -> f64 {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = row.iter().map(|&x| f64::from(x - max).exp()).sum();
    sum.ln() + f64::from(max) - row.get(target as usize).map_or(f64::NEG_INFINITY, |&x| f64::from(x))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::executor::{StepHandle, StepOutput};

    /// Returns, as logits, the token and the position of each row; checks the arrays' shapes.
    struct Echo {
        logits: Option<Vec<f32>>,
        steps: Vec<(usize, usize)>,
    }

    impl Executor for Echo {
        fn launch(&mut self, batch: &StepBatch) -> Result<StepHandle, ExecError> {
            let n = batch.num_tokens();
            assert_eq!(batch.positions.len(), n);
            assert_eq!((batch.penalty_start.len(), batch.bias_start.len()), (n + 1, n + 1));
            assert_eq!(*batch.row_start.last().unwrap() as usize, n);
            for r in 0..batch.num_rows() {
                let table =
                    &batch.block_tables[batch.block_table_start[r] as usize..batch.block_table_start[r + 1] as usize];
                for t in batch.row_start[r]..batch.row_start[r + 1] {
                    let (p, slot) = (batch.positions[t as usize], batch.kv_slots[t as usize]);
                    assert_eq!(table[(p / 4) as usize] * 4 + p % 4, slot);
                }
            }
            let rows = batch.input_ids.iter().zip(&batch.positions).flat_map(|(&t, &p)| [t as f32, p as f32]);
            self.logits = Some(rows.collect());
            self.steps.push((batch.num_rows(), n));
            Ok(StepHandle(0))
        }
        fn wait(&mut self, _: StepHandle) -> Result<StepOutput, ExecError> {
            Ok(StepOutput { logits: self.logits.take(), ..StepOutput::default() })
        }
        fn num_blocks(&self) -> u32 {
            64
        }
        fn block_size(&self) -> u32 {
            4
        }
        fn vocab_size(&self) -> u32 {
            2
        }
        fn kv_bytes_per_block(&self) -> u64 {
            1
        }
    }

    #[test]
    fn every_position_arrives_once_however_it_is_cut() {
        let prompts = vec![vec![7, 8, 9, 10, 11], vec![3], vec![1, 2, 3, 4, 5, 6, 7, 8, 9]];
        for (chunk, is_batched) in [(None, false), (Some(1), false), (Some(2), true), (None, true), (Some(7), true)] {
            let plan = LogitsPlan { chunk, is_batched, max_tokens_per_step: 6 };
            let mut echo = Echo { logits: None, steps: Vec::new() };
            let mut got: Vec<Vec<f32>> = vec![Vec::new(); 3];
            all_logits(&mut echo, &prompts, plan, &mut |i, at, rows| {
                assert_eq!(got[i].len(), at * 2);
                got[i].extend_from_slice(rows);
            })
            .unwrap();
            for (prompt, got) in prompts.iter().zip(&got) {
                let want: Vec<f32> = prompt.iter().enumerate().flat_map(|(p, &t)| [t as f32, p as f32]).collect();
                assert_eq!(*got, want, "{plan:?}");
            }
            assert!(echo.steps.iter().all(|&(rows, tokens)| tokens <= 6 && (rows == 1 || is_batched)));
        }
        let plan = LogitsPlan { chunk: None, is_batched: true, max_tokens_per_step: 6 };
        assert_eq!(plan.needs(&prompts, 4, 1), LogitsNeeds { num_blocks: 1 + 2 + 1 + 3, num_rows: 3 });
        assert_eq!(plan.needs(&prompts, 4, 2).num_blocks, 1 + 2 * (2 + 1 + 3), "a table per group");
    }

    #[test]
    fn divergence_is_zero_between_equals_and_known_between_others() {
        let row = [1.0, -2.0, 0.5];
        let shifted = row.map(|x| x + 3.0);
        assert!(kl_divergence(&row, &shifted).abs() < 1e-12);
        // Of a fair coin and one that falls on one side three times of four: ln 2 - ln 3 / 2.
        let got = [3f32.ln(), 0.0];
        assert!((kl_divergence(&[0.0, 0.0], &got) - (2f64.ln() - 3f64.ln() / 2.0)).abs() < 1e-7);
    }

    #[test]
    fn two_executors_go_in_lockstep() {
        let prompt: Vec<TokenId> = (0..11).collect();
        let plan = LogitsPlan { chunk: Some(4), is_batched: false, max_tokens_per_step: 6 };
        let echo = || Echo { logits: None, steps: Vec::new() };
        let (mut a, mut b) = (echo(), echo());
        let mut positions = Vec::new();
        logits_of_two((&mut a, &mut b), &prompt, plan, &mut |first, of_a, of_b| {
            assert_eq!(of_a, of_b);
            positions.extend(first..first + of_a.len() / 2);
        })
        .unwrap();
        assert_eq!(positions, (0..11).collect::<Vec<_>>());
        assert_eq!((a.steps.len(), b.steps.len()), (3, 3));
    }

    #[test]
    fn likelihood_of_equal_logits_is_uniform() {
        assert!((nll(&[2.0; 8], 3) - 8f64.ln()).abs() < 1e-12);
        assert!(nll(&[0.0, 100.0], 1).abs() < 1e-12);
    }
}
