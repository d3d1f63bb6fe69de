//! A model that is loaded.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::channel;

use anyhow::{Context, Result, bail};
use larder_runtime::{
    ChatMessages, GenerateOptions, GeneratedText, LoadOptions, Model, SharedStats, TextCodec, guarded,
};
use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::array::PyArray;
use crate::background::{Wanted, compute, spawn};
use crate::errors::or_raise;
use crate::images::{PyPicture, files_of};
use crate::stream::{PieceEvent, PieceSender, PyStream};

/// A model. Calls from several threads wait for each other.
#[pyclass(frozen, name = "Model", module = "larder._larder")]
pub struct PyModel {
    slot: Arc<ModelSlot>,
    text: Arc<TextCodec>,
    context: usize,
    stats: SharedStats,
    /// The process that loaded it, whose threads compute.
    process: u32,
}

/// A model until it is closed.
struct ModelSlot(Mutex<Option<Model>>);

impl ModelSlot {
    /// Waits until nothing else uses the model.
    fn with<T>(&self, use_it: impl FnOnce(&mut Model) -> Result<T>) -> Result<T> {
        let mut model = self.0.lock();
        use_it(model.as_mut().context("the model is closed; load it again")?)
    }
}

/// What a stream is generated from.
enum Source {
    Text(String),
    Tokens(Vec<u32>),
    Chat(ChatMessages),
}

impl Source {
    fn answer(&self, model: &mut Model, options: &GenerateOptions, to: &mut PieceSender) -> Result<GeneratedText> {
        match self {
            Source::Text(prompt) => model.generate_with(prompt, options, to),
            Source::Tokens(tokens) => model.generate_from(tokens, options, to),
            Source::Chat(chat) => model.chat(chat, options, to),
        }
    }
}

impl PyModel {
    fn of(model: Model) -> Self {
        let (text, context, stats) = (model.text_codec().clone(), model.context(), model.shared_stats());
        let slot = Arc::new(ModelSlot(Mutex::new(Some(model))));
        PyModel { slot, text, context, stats, process: std::process::id() }
    }

    /// Fails in a process that was forked: the threads of the model are not there.
    fn check_process(&self) -> Result<()> {
        if self.process != std::process::id() {
            bail!("the model was loaded by another process, whose threads compute; load it in this process");
        }
        Ok(())
    }

    /// The result of work with the model, on a thread.
    fn compute<T: Send + 'static>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Model, &Wanted) -> Result<T> + Send + 'static,
    ) -> PyResult<T> {
        or_raise(self.check_process())?;
        let slot = self.slot.clone();
        compute(py, move |wanted| slot.with(|model| work(model, wanted)))
    }

    fn stream(&self, py: Python<'_>, source: Source, images: Vec<PyPicture>, options: &str) -> Result<PyStream> {
        self.check_process()?;
        let options = GenerateOptions { images: files_of(py, images)?, ..GenerateOptions::from_json(options)? };
        let (slot, wanted, (sender, receiver)) = (self.slot.clone(), Wanted::default(), channel());
        let mut to = PieceSender { sender: sender.clone(), wanted: wanted.clone() };
        spawn(move || {
            let answer = guarded(|| slot.with(|model| source.answer(model, &options, &mut to)));
            // Before the end is told: the model may be freed as soon as it is.
            drop(slot);
            drop(sender.send(PieceEvent::End(Box::new(answer))));
        })?;
        Ok(PyStream::new(receiver, wanted))
    }
}

#[pymethods]
impl PyModel {
    /// Loads a model with options as JSON.
    #[staticmethod]
    fn load(py: Python<'_>, path: PathBuf, options: String) -> PyResult<Self> {
        let model = compute(py, move |_| {
            let options = LoadOptions::from_json(&options)?;
            let (models, cache) = (larder_command::models_folder(), larder_command::cache_folder());
            let (models, cache_folder) = (options.models.clone().or(models), options.cache_folder.clone().or(cache));
            Model::load_with(&path, &LoadOptions { models, cache_folder, ..options })
        })?;
        Ok(PyModel::of(model))
    }

    /// Frees the model as soon as nothing uses it any more.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let slot = self.slot.clone();
        compute(py, move |_| {
            drop(slot.0.lock().take());
            Ok(())
        })
    }

    /// Generates from a text behind images, with options as JSON.
    fn generate(&self, py: Python<'_>, prompt: String, images: Vec<PyPicture>, options: &str) -> PyResult<PyStream> {
        or_raise(self.stream(py, Source::Text(prompt), images, options))
    }

    /// Generates from tokens, some of which may stand for images.
    fn generate_from(
        &self,
        py: Python<'_>,
        tokens: Vec<u32>,
        images: Vec<PyPicture>,
        options: &str,
    ) -> PyResult<PyStream> {
        or_raise(self.stream(py, Source::Tokens(tokens), images, options))
    }

    /// Answers a chat, which is JSON too, with images.
    fn chat(&self, py: Python<'_>, chat: &str, images: Vec<PyPicture>, options: &str) -> PyResult<PyStream> {
        let chat = or_raise(ChatMessages::from_json(chat))?;
        or_raise(self.stream(py, Source::Chat(chat), images, options))
    }

    /// The prompt that the template makes of a chat.
    fn chat_prompt(&self, py: Python<'_>, chat: &str) -> PyResult<String> {
        let chat = or_raise(ChatMessages::from_json(chat))?;
        self.compute(py, move |model, _| model.chat_prompt(&chat))
    }

    /// The tokens of a text.
    fn tokenize(&self, py: Python<'_>, text: &str, add_special: bool) -> PyResult<Vec<u32>> {
        or_raise(py.detach(|| Ok(self.text.tokenizer.encode_for(self.context.max(1 << 20), text, add_special)?)))
    }

    /// The text of tokens.
    fn detokenize(&self, py: Python<'_>, tokens: Vec<u32>, skip_special: bool) -> String {
        py.detach(|| self.text.tokenizer.decode(&tokens, skip_special))
    }

    /// The logits behind each token, `[tokens, vocab]`.
    fn logits(&self, py: Python<'_>, tokens: Vec<u32>) -> PyResult<PyArray> {
        let (logits, vocab) = self.compute(py, move |model, wanted| model.logits(&tokens, &|| wanted.get()))?;
        let rows = logits.len() / vocab.max(1);
        Ok(PyArray::new(Arc::new(logits), vec![rows, vocab]))
    }

    /// The embeddings of texts, `[texts, hidden]`.
    fn embed(&self, py: Python<'_>, texts: Vec<String>) -> PyResult<PyArray> {
        let rows = texts.len();
        let all = self.compute(py, move |model, wanted| {
            let embed = |text: &String| model.embed(text, &|| wanted.get());
            Ok(texts.iter().map(embed).collect::<Result<Vec<_>>>()?.concat())
        })?;
        let hidden = all.len() / rows.max(1);
        Ok(PyArray::new(Arc::new(all), vec![rows, hidden]))
    }

    /// Replaces the routing strategy.
    #[pyo3(signature = (routing, quality))]
    fn set_routing(&self, py: Python<'_>, routing: Option<String>, quality: Option<String>) -> PyResult<()> {
        self.compute(py, move |model, _| model.set_routing(routing.as_deref(), quality.as_deref()))
    }

    /// The counts as of the last step, as JSON. Does not wait.
    fn stats(&self) -> PyResult<String> {
        or_raise(serde_json::to_string(&self.stats.get()).map_err(anyhow::Error::from))
    }

    /// Architecture, sizes, memory plan and notices, as JSON.
    fn info(&self, py: Python<'_>) -> PyResult<String> {
        self.compute(py, |model, _| Ok(model.info().to_string()))
    }
}
