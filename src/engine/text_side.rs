//! The text side of a model: tokenizer, chat template and what ends an output, read from the model's files.

use super::loader::LoadFailure;
use crate::ids::TokenId;
use crate::model::gguf::GgufFile;
use crate::model::{Model, ModelError, files};
use crate::tokenizer::{ChatTemplate, GgufVocab, HfTokenizerFiles, Tokenizer};
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;

/// Text to tokens and back for one model.
pub struct TextSide {
    pub tokenizer: Arc<Tokenizer>,
    /// `None` when the model has none, or one that cannot be parsed (see `template_fault`).
    pub template: Option<Arc<ChatTemplate>>,
    /// Any of these ends the output.
    pub eos_token_ids: Vec<TokenId>,
    pub template_fault: Option<String>,
}

/// Reads the text side of an opened model.
pub fn read(model: &Model) -> Result<TextSide, LoadFailure> {
    let path = &model.info().path;
    let tokenizer = match (model.gguf(), model.folder()) {
        (Some(file), _) => Tokenizer::from_gguf(gguf_vocab(file)?),
        (None, Some(folder)) => Tokenizer::from_hf(hf_files(folder)?),
        (None, None) => return Err(LoadFailure::model("the model has no tokenizer", path)),
    };
    let tokenizer = tokenizer.map_err(|e| LoadFailure::model(e, path))?;
    let (has, room) = (tokenizer.vocab_size(), model.spec().vocab_size as usize);
    if has > room {
        let fault = format!("the tokenizer has {has} tokens, the model's embedding only {room}");
        return Err(LoadFailure::model(fault, path));
    }
    let (template, template_fault) = match model.chat_template()? {
        None => (None, None),
        Some(source) => match ChatTemplate::new(&source, tokenizer.special_tokens()) {
            Ok(template) => (Some(Arc::new(template)), None),
            Err(error) => (None, Some(error.to_string())),
        },
    };
    let mut eos_token_ids = model.spec().eos_token_ids.clone();
    eos_token_ids.extend(tokenizer.eos_id());
    eos_token_ids.extend(tokenizer.end_of_turn_ids());
    eos_token_ids.sort_unstable();
    eos_token_ids.dedup();
    Ok(TextSide { tokenizer: Arc::new(tokenizer), template, eos_token_ids, template_fault })
}

fn hf_files(folder: &Path) -> Result<HfTokenizerFiles, LoadFailure> {
    let tokenizer_json = files::read_text(&folder.join("tokenizer.json"))?.ok_or_else(|| {
        LoadFailure::model("the folder has no tokenizer.json", folder)
            .with_fix("download the model again with all its files; tokenizer.model alone is not supported")
    })?;
    Ok(HfTokenizerFiles {
        tokenizer_json: tokenizer_json.into_bytes(),
        tokenizer_config: object(folder, "tokenizer_config.json")?,
        special_tokens_map: object(folder, "special_tokens_map.json")?,
    })
}

fn object(folder: &Path, name: &str) -> Result<Option<Value>, ModelError> {
    Ok(files::read_json_object(&folder.join(name))?.map(Value::Object))
}

fn gguf_vocab(file: &GgufFile) -> Result<GgufVocab, LoadFailure> {
    let strings = |key: &str| -> Result<Vec<String>, ModelError> {
        Ok(file.strings(key)?.unwrap_or_default().into_iter().map(String::from).collect())
    };
    let model = file.string("tokenizer.ggml.model")?.ok_or_else(|| {
        LoadFailure::model("the file has no tokenizer (tokenizer.ggml.model is missing)", file.path())
    })?;
    Ok(GgufVocab {
        model: model.into(),
        pre: file.string("tokenizer.ggml.pre")?.map(String::from),
        tokens: strings("tokenizer.ggml.tokens")?,
        scores: file.f32s("tokenizer.ggml.scores")?.unwrap_or_default(),
        token_types: file.i32s("tokenizer.ggml.token_type")?.unwrap_or_default(),
        merges: strings("tokenizer.ggml.merges")?,
        bos: file.u32("tokenizer.ggml.bos_token_id")?,
        eos: file.u32("tokenizer.ggml.eos_token_id")?,
        unk: file.u32("tokenizer.ggml.unknown_token_id")?,
        pad: file.u32("tokenizer.ggml.padding_token_id")?,
        add_bos: file.bool("tokenizer.ggml.add_bos_token")?,
        add_eos: file.bool("tokenizer.ggml.add_eos_token")?,
        add_space_prefix: file.bool("tokenizer.ggml.add_space_prefix")?,
    })
}
