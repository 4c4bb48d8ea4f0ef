//! A loaded model as plain data: what an app elsewhere needs to show it and to make tokens for it.

use super::handle::{AdapterSummary, GenerationDefaults, LoadedModel};
use super::loader::LoadFailure;
use super::loras::LoraTable;
use super::text_side::TextSource;
use crate::ids::TokenId;
use crate::model::Model;
use crate::protocol::Pooling;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The facts of a [`LoadedModel`], and what its tokenizer and template are made of. Paths of the machine are left out.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Description {
    pub name: String,
    pub arch: String,
    pub quant: String,
    pub num_params: u64,
    pub file_bytes: u64,
    pub max_model_len: u32,
    pub vocab_size: u32,
    pub hidden_size: u32,
    pub eos_token_ids: Vec<TokenId>,
    pub adapter: AdapterSummary,
    pub block_size: u32,
    pub num_blocks: u32,
    pub kv_bytes_per_block: u64,
    pub has_windows: bool,
    pub max_num_seqs: u32,
    pub max_num_batched_tokens: u32,
    pub defaults: GenerationDefaults,
    pub text: TextSource,
}

impl Description {
    /// Describes a model; its tokenizer is read from its files again.
    pub fn of(model: &LoadedModel) -> Result<Description, LoadFailure> {
        let mut text = match &model.path {
            Some(path) => TextSource::of(&Model::open(path)?)?,
            None => super::fake::text_source(),
        };
        // It may come from elsewhere than the model's files.
        if let Some(template) = &model.template {
            text.template = Some(template.source().to_owned());
        }
        Ok(Description {
            name: model.name.clone(),
            arch: model.arch.clone(),
            quant: model.quant.clone(),
            num_params: model.num_params,
            file_bytes: model.file_bytes,
            max_model_len: model.max_model_len,
            vocab_size: model.vocab_size,
            hidden_size: model.hidden_size,
            eos_token_ids: model.eos_token_ids.clone(),
            adapter: model.adapter.clone(),
            block_size: model.block_size,
            num_blocks: model.num_blocks,
            kv_bytes_per_block: model.kv_bytes_per_block,
            has_windows: model.has_windows,
            max_num_seqs: model.max_num_seqs,
            max_num_batched_tokens: model.max_num_batched_tokens,
            defaults: model.defaults.clone(),
            text,
        })
    }

    /// The model that it describes. The error says what is wrong with the tokenizer.
    pub fn build(self) -> Result<LoadedModel, String> {
        let (mut tokenizer, (template, template_fault)) = self.text.build().map_err(|e| e.to_string())?;
        tokenizer.limit_to(self.vocab_size);
        Ok(LoadedModel {
            name: self.name,
            path: None,
            arch: self.arch,
            quant: self.quant,
            num_params: self.num_params,
            file_bytes: self.file_bytes,
            max_model_len: self.max_model_len,
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            // Vectors are the server's business.
            pooling: Ok(Pooling::Last),
            eos_token_ids: self.eos_token_ids,
            tokenizer: Arc::new(tokenizer),
            template,
            template_fault,
            adapter: self.adapter,
            block_size: self.block_size,
            num_blocks: self.num_blocks,
            kv_bytes_per_block: self.kv_bytes_per_block,
            has_windows: self.has_windows,
            // The server refuses what needs one.
            has_head: true,
            max_num_seqs: self.max_num_seqs,
            max_num_batched_tokens: self.max_num_batched_tokens,
            defaults: self.defaults,
            // Its adapters are models of their own to whoever asks the server.
            loras: LoraTable::default(),
        })
    }
}
