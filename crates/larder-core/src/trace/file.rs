//! The file format of a trace: safetensors, so that other programs can open it too.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use half::f16;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::{Value, json};

use super::{CapacityAt, Trace, TraceError, TraceToken};
use larder_os::{open_regular, write_atomically};

const FORMAT: &str = "larder-trace";
const VERSION: &str = "2";
/// Largest header that is read, in bytes; a trace has a much smaller one.
const HEADER_MAX: u64 = 16 << 20;
/// The tensor that says which changes of the number of slots came before a new sequence. Traces in which none did
/// do not have it.
const BEFORE_SEQUENCE: &str = "capacities_before_sequence";
/// Metadata keys of the format, beside those of [`Trace::meta`].
const OWN_KEYS: [&str; 5] = ["format", "version", "layers", "experts", "top_k"];

impl Trace {
    /// Reads a file and checks all of it.
    pub fn read(path: impl AsRef<Path>) -> Result<Self, TraceError> {
        let mut open = Open::new(path.as_ref())?;
        let trace = open.trace()?;
        trace.check().map_err(|e| match e {
            TraceError::Content(why) => open.malformed(why),
            other => other,
        })?;
        Ok(trace)
    }

    /// Writes a file atomically: it appears whole or not at all.
    pub fn write(&self, path: impl AsRef<Path>) -> Result<(), TraceError> {
        self.check()?;
        let path = path.as_ref();
        let io = |source| TraceError::Io { path: path.to_owned(), doing: "writing", source };
        write_atomically(path, |out| self.write_to(out)).map_err(io)
    }

    fn write_to(&self, out: &mut impl Write) -> std::io::Result<()> {
        let tokens = self.tokens();
        let (places, all) = (vec![tokens, self.rows, self.top_k], vec![tokens, self.rows, self.experts]);
        // Tensors with the widest values come first, so that each tensor is aligned.
        let mut tensors: Vec<(&str, &str, Vec<usize>, Vec<u8>)> = Vec::new();
        if !self.logits.is_empty() {
            tensors.push(("logits", "F32", all, self.logits.iter().flat_map(|l| l.to_le_bytes()).collect()));
        }
        for (name, lengths) in [("passes", &self.passes), ("sequences", &self.sequences)] {
            let bytes = lengths.iter().flat_map(|n| n.to_le_bytes()).collect();
            tensors.push((name, "U32", vec![lengths.len()], bytes));
        }
        if !self.capacities.is_empty() {
            let bytes = self.capacities.iter().flat_map(|c| [c.pass, c.slots]).flat_map(u32::to_le_bytes).collect();
            tensors.push(("capacities", "U32", vec![self.capacities.len(), 2], bytes));
        }
        let bytes = self.origins.iter().flat_map(|o| o.sequence.to_le_bytes()).collect();
        tensors.push(("sequence_of", "U32", vec![tokens], bytes));
        tensors.push(("experts", "U16", places.clone(), self.ids.iter().flat_map(|id| id.to_le_bytes()).collect()));
        if !self.weights.is_empty() {
            tensors.push(("weights", "F16", places, self.weights.iter().flat_map(|w| w.to_le_bytes()).collect()));
        }
        tensors.push(("decode", "U8", vec![tokens], self.origins.iter().map(|o| u8::from(o.decode)).collect()));
        if self.capacities.iter().any(|c| c.before_sequence) {
            let flags: Vec<u8> = self.capacities.iter().map(|c| u8::from(c.before_sequence)).collect();
            tensors.push((BEFORE_SEQUENCE, "U8", vec![flags.len()], flags));
        }
        let mut header = serde_json::Map::new();
        header.insert("__metadata__".into(), json!(self.metadata()));
        let mut end = 0;
        for (name, dtype, shape, bytes) in &tensors {
            let info = json!({"dtype": dtype, "shape": shape, "data_offsets": [end, end + bytes.len()]});
            header.insert((*name).into(), info);
            end += bytes.len();
        }
        let mut header = Value::Object(header).to_string().into_bytes();
        header.resize(header.len().next_multiple_of(8), b' ');
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        tensors.iter().try_for_each(|(_, _, _, bytes)| out.write_all(bytes))
    }

    fn metadata(&self) -> BTreeMap<String, String> {
        let sizes = [self.rows, self.experts, self.top_k].map(|n| n.to_string());
        let own = [FORMAT.to_owned(), VERSION.to_owned()].into_iter().chain(sizes);
        let mut all = self.meta.clone();
        all.extend(OWN_KEYS.map(str::to_owned).into_iter().zip(own));
        all
    }
}

/// A file whose header has been read.
struct Open {
    path: PathBuf,
    file: File,
    /// First byte of the data.
    start: u64,
    header: Metadata,
}

impl Open {
    fn new(path: &Path) -> Result<Self, TraceError> {
        let io = |source| TraceError::Io { path: path.to_owned(), doing: "reading", source };
        let foreign = |why: String| TraceError::Foreign { path: path.to_owned(), why };
        let mut file = open_regular(path).map_err(io)?;
        let about = file.metadata().map_err(io)?;
        let mut length = [0; 8];
        if about.len() < 8 {
            return Err(foreign(format!("it is {} bytes long", about.len())));
        }
        file.read_exact(&mut length).map_err(io)?;
        let length = u64::from_le_bytes(length);
        if length > HEADER_MAX || length > about.len() - 8 {
            return Err(foreign("it has no safetensors header".into()));
        }
        let mut header = vec![0; length as usize];
        file.read_exact(&mut header).map_err(io)?;
        let header: Metadata =
            serde_json::from_slice(&header).map_err(|e| foreign(format!("its safetensors header is broken ({e})")))?;
        let open = Open { path: path.to_owned(), file, start: 8 + length, header };
        let (has, wants) = (about.len() - open.start, open.header.data_len() as u64);
        if has == wants {
            Ok(open)
        } else {
            Err(open.malformed(format!("holds {has} bytes of data, but its header describes {wants}")))
        }
    }

    fn malformed(&self, why: String) -> TraceError {
        TraceError::Malformed { path: self.path.clone(), why }
    }

    fn trace(&mut self) -> Result<Trace, TraceError> {
        let mut meta: BTreeMap<String, String> =
            self.header.metadata().clone().unwrap_or_default().into_iter().collect();
        if meta.get("format").map(String::as_str) != Some(FORMAT) {
            let why = format!("its metadata do not say 'format': '{FORMAT}'");
            return Err(TraceError::Foreign { path: self.path.clone(), why });
        }
        let version = meta.get("version").map_or("none", String::as_str);
        if version != VERSION {
            let why = format!(
                "has version {version}, but this larder reads only version {VERSION}; record the trace again with `larder run --trace`"
            );
            return Err(self.malformed(why));
        }
        let experts = self.number(&meta, "experts")?;
        let places = self.shape("experts", 3)?;
        let (tokens, rows, top_k) = (places[0], places[1], places[2]);
        if rows != self.number(&meta, "layers")? || top_k != self.number(&meta, "top_k")? {
            return Err(self.malformed(format!("has 'experts' of shape {places:?}, which contradicts its metadata")));
        }
        OWN_KEYS.iter().for_each(|key| drop(meta.remove(*key)));
        let logits = match self.header.info("logits").map(|info| info.dtype) {
            None => Vec::new(),
            Some(Dtype::F16) => self.halves("logits", &[tokens, rows, experts])?.into_iter().map(f16::to_f32).collect(),
            Some(_) => self.read("logits", Dtype::F32, &[tokens, rows, experts], f32::from_le_bytes)?,
        };
        let weights = match self.header.info("weights") {
            None => Vec::new(),
            Some(_) => self.halves("weights", &places)?,
        };
        let lengths = |open: &mut Self, name| {
            let shape = open.shape(name, 1)?;
            open.read(name, Dtype::U32, &shape, u32::from_le_bytes)
        };
        let ids = self.read("experts", Dtype::U16, &places, u16::from_le_bytes)?;
        let (passes, sequences) = (lengths(self, "passes")?, lengths(self, "sequences")?);
        let (origins, capacities) = (self.origins(tokens)?, self.capacities()?);
        Ok(Trace { rows, experts, top_k, ids, weights, logits, origins, passes, sequences, capacities, meta })
    }

    /// The changes of the number of slots, which few traces have.
    fn capacities(&mut self) -> Result<Vec<CapacityAt>, TraceError> {
        if self.header.info("capacities").is_none() {
            return Ok(Vec::new());
        }
        let changes = self.shape("capacities", 2)?[0];
        let values = self.read("capacities", Dtype::U32, &[changes, 2], u32::from_le_bytes)?;
        let before = match self.header.info(BEFORE_SEQUENCE) {
            None => vec![false; changes],
            Some(_) => self.flags(BEFORE_SEQUENCE, changes)?,
        };
        let change = |(&[pass, slots], before_sequence): (&[u32; 2], bool)| CapacityAt { pass, slots, before_sequence };
        Ok(values.as_chunks().0.iter().zip(before).map(change).collect())
    }

    fn origins(&mut self, tokens: usize) -> Result<Vec<TraceToken>, TraceError> {
        let sequences = self.read("sequence_of", Dtype::U32, &[tokens], u32::from_le_bytes)?;
        let decode = self.flags("decode", tokens)?;
        let origin = |(sequence, decode)| TraceToken { sequence, decode };
        Ok(sequences.into_iter().zip(decode).map(origin).collect())
    }

    /// A tensor of `count` flags.
    fn flags(&mut self, name: &str, count: usize) -> Result<Vec<bool>, TraceError> {
        let flags = self.read(name, Dtype::U8, &[count], |[flag]: [u8; 1]| flag)?;
        match flags.iter().position(|flag| *flag > 1) {
            Some(at) => {
                Err(self.malformed(format!("has {} in '{name}' at index {at}, which must be 0 or 1", flags[at])))
            }
            None => Ok(flags.into_iter().map(|flag| flag == 1).collect()),
        }
    }

    fn number(&self, meta: &BTreeMap<String, String>, key: &str) -> Result<usize, TraceError> {
        let number = meta.get(key).and_then(|n| n.parse().ok());
        number.ok_or_else(|| self.malformed(format!("has no number '{key}' in its metadata")))
    }

    fn info(&self, name: &str) -> Result<&TensorInfo, TraceError> {
        self.header.info(name).ok_or_else(|| self.malformed(format!("has no tensor '{name}'")))
    }

    fn shape(&self, name: &str, dimensions: usize) -> Result<Vec<usize>, TraceError> {
        let shape = &self.info(name)?.shape;
        if shape.len() == dimensions {
            Ok(shape.clone())
        } else {
            Err(self.malformed(format!("has '{name}' of shape {shape:?}, which must have {dimensions} dimensions")))
        }
    }

    fn halves(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f16>, TraceError> {
        self.read(name, Dtype::F16, shape, f16::from_le_bytes)
    }

    /// Reads a tensor. The header was checked to give each tensor the bytes of its shape, inside the file.
    fn read<const N: usize, T>(
        &mut self,
        name: &str,
        dtype: Dtype,
        shape: &[usize],
        value: impl Fn([u8; N]) -> T,
    ) -> Result<Vec<T>, TraceError> {
        let info = self.info(name)?;
        if info.dtype != dtype || info.shape != shape {
            let (got, has) = (info.dtype, &info.shape);
            let why = format!("has '{name}' as {got:?} of shape {has:?}, not as {dtype:?} of shape {shape:?}");
            return Err(self.malformed(why));
        }
        let (from, to) = info.data_offsets;
        let mut bytes = vec![0; to - from];
        let read =
            self.file.seek(SeekFrom::Start(self.start + from as u64)).and_then(|_| self.file.read_exact(&mut bytes));
        read.map_err(|source| TraceError::Io { path: self.path.clone(), doing: "reading", source })?;
        Ok(bytes.as_chunks().0.iter().map(|chunk| value(*chunk)).collect())
    }
}
