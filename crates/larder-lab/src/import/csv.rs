//! Traces as CSV, a line for each chosen expert: columns `token`, `layer` and `expert`, optionally `sequence`, `pass`,
//! `rank` and `weight`, in any order. Lines are in the order of sequences and tokens.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use half::f16;
use larder_core::{Trace, TracePass, UNUSED};
use larder_os::open_regular;

use super::ImportOptions;
use crate::LabError;

const COLUMNS: [&str; 7] = ["sequence", "pass", "token", "layer", "rank", "expert", "weight"];

/// Limit of a line's length in bytes.
const LINE_MAX: u64 = 4096;

/// One line: a chosen expert.
struct Choice {
    token: u64,
    layer: u64,
    rank: u64,
    expert: u16,
    weight: Option<f32>,
}

/// The choices of one token, with its sequence and pass.
struct Token {
    sequence: u64,
    pass: Option<u64>,
    choices: Vec<Choice>,
}

pub(super) fn read(path: &Path, options: &ImportOptions) -> Result<Trace, LabError> {
    let tokens = tokens(path)?;
    let wrong = |why: String| LabError::malformed(path, why);
    let choices = || tokens.iter().flat_map(|token| &token.choices);
    let layers: BTreeSet<u64> = choices().map(|c| c.layer).collect();
    let rows: BTreeMap<u64, usize> = layers.into_iter().zip(0..).collect();
    let largest = choices().map(|c| c.expert as usize).max().ok_or_else(|| wrong("holds no tokens".into()))?;
    let experts = options.experts.unwrap_or(largest + 1);
    if largest >= experts {
        return Err(wrong(format!("has expert {largest}, but only {experts} experts per layer were expected")));
    }
    let layers_of = |token: &Token| token.choices.iter().map(|c| c.layer).collect::<BTreeSet<_>>().len();
    if let Some(lacking) = tokens.iter().find(|token| layers_of(token) < rows.len()) {
        let token = lacking.choices[0].token;
        return Err(wrong(format!("has no expert for some layer of token {token}; each token needs all layers")));
    }
    let ranked: Vec<Vec<Vec<Ranked>>> = tokens.iter().map(|token| by_row(token, &rows)).collect();
    let top_k = ranked.iter().flatten().map(Vec::len).max().unwrap_or(0);
    let places = tokens.len().saturating_mul(rows.len()).saturating_mul(top_k);
    let lines = choices().count();
    // Uneven choices are padded; this bounds the memory that a single long choice can cause.
    if places > lines.saturating_mul(64) {
        return Err(wrong(format!(
            "has {lines} choices, too few for {} tokens with up to {top_k} experts each",
            tokens.len()
        )));
    }
    let weighted = choices().all(|c| c.weight.is_some());
    let mut trace = Trace::new(rows.len(), experts, top_k);
    let same_pass = |a: &Token, b: &Token| a.sequence == b.sequence && a.pass.is_some() && a.pass == b.pass;
    let mut at = 0;
    for pass in tokens.chunk_by(same_pass) {
        let (mut ids, mut weights) = (Vec::new(), Vec::new());
        for place in ranked[at..at + pass.len()].iter().flatten().flat_map(|row| padded(row, top_k)) {
            ids.push(place.map_or(UNUSED, |c| c.0));
            if weighted {
                weights.push(f16::from_f32(place.and_then(|c| c.1).unwrap_or(0.0)));
            }
        }
        let starts_sequence = at == 0 || tokens[at - 1].sequence != tokens[at].sequence;
        trace.push(&TracePass { ids: &ids, weights: &weights, starts_sequence, ..TracePass::default() })?;
        at += pass.len();
    }
    trace.meta.insert("source".into(), path.file_name().unwrap_or_default().to_string_lossy().into_owned());
    Ok(trace)
}

/// An expert with its weight.
type Ranked = (u16, Option<f32>);

fn padded(row: &[Ranked], top_k: usize) -> impl Iterator<Item = Option<Ranked>> + '_ {
    (0..top_k).map(|rank| row.get(rank).copied())
}

fn by_row(token: &Token, rows: &BTreeMap<u64, usize>) -> Vec<Vec<Ranked>> {
    let mut ordered: Vec<&Choice> = token.choices.iter().collect();
    ordered.sort_by_key(|c| c.rank);
    let mut all = vec![Vec::new(); rows.len()];
    ordered.iter().for_each(|c| all[rows[&c.layer]].push((c.expert, c.weight)));
    all
}

/// The file's lines, grouped by token.
fn tokens(path: &Path) -> Result<Vec<Token>, LabError> {
    let mut lines = Lines::new(path)?;
    let header = lines.next()?.unwrap_or_default();
    let places = columns(path, &header)?;
    let mut tokens: Vec<Token> = Vec::new();
    while let Some(line) = lines.next()? {
        let cells: Vec<&str> = line.split(',').map(str::trim).collect();
        let wrong = |why: String| LabError::malformed(path, format!("has {why} in line {}", lines.number));
        let number = |column: usize| -> Result<Option<u64>, LabError> {
            let Some(place) = places[column] else { return Ok(None) };
            let cell = cells.get(place).copied().unwrap_or_default();
            let parsed =
                cell.parse().map_err(|_| wrong(format!("'{cell}' instead of a number for {}", COLUMNS[column])))?;
            Ok(Some(parsed))
        };
        let (sequence, pass) = (number(0)?.unwrap_or(0), number(1)?);
        let (token, layer) = (number(2)?.unwrap_or(0), number(3)?.unwrap_or(0));
        let expert = number(5)?.unwrap_or(0);
        let expert = u16::try_from(expert).ok().filter(|e| *e < UNUSED - 1);
        let weight = places[6].map(|place| cells.get(place).copied().unwrap_or_default());
        let weight = weight.map(|cell| cell.parse::<f32>().map_err(|_| wrong(format!("'{cell}' instead of a weight"))));
        let choice = Choice {
            token,
            layer,
            rank: number(4)?.unwrap_or(0),
            expert: expert.ok_or_else(|| wrong("an expert id that is too large".into()))?,
            weight: weight.transpose()?,
        };
        match tokens.last_mut() {
            Some(last) if last.sequence == sequence && last.choices[0].token == token => last.choices.push(choice),
            Some(last) if last.sequence > sequence || (last.sequence == sequence && last.choices[0].token > token) => {
                return Err(wrong(format!("token {token} of sequence {sequence} after a later one")));
            }
            _ => tokens.push(Token { sequence, pass, choices: vec![choice] }),
        }
    }
    Ok(tokens)
}

/// The position of each of [`COLUMNS`] in the header.
fn columns(path: &Path, header: &str) -> Result<[Option<usize>; 7], LabError> {
    let names: Vec<&str> = header.split(',').map(str::trim).collect();
    let places = COLUMNS.map(|column| names.iter().position(|name| *name == column));
    match [2, 3, 5].into_iter().find(|needed| places[*needed].is_none()) {
        Some(missing) => {
            let why = format!("is not a CSV trace: the header has no column '{}'", COLUMNS[missing]);
            Err(LabError::malformed(path, why))
        }
        None => Ok(places),
    }
}

/// Lines of bounded length.
struct Lines<'a> {
    path: &'a Path,
    file: BufReader<File>,
    number: usize,
}

impl<'a> Lines<'a> {
    fn new(path: &'a Path) -> Result<Self, LabError> {
        let file = open_regular(path).map_err(LabError::io(path, "opening"))?;
        Ok(Lines { path, file: BufReader::new(file), number: 0 })
    }

    /// The next non-empty line.
    fn next(&mut self) -> Result<Option<String>, LabError> {
        loop {
            let mut line = Vec::new();
            let read = self.file.by_ref().take(LINE_MAX).read_until(b'\n', &mut line);
            if read.map_err(LabError::io(self.path, "reading"))? == 0 {
                return Ok(None);
            }
            self.number += 1;
            let text = String::from_utf8(line).ok().filter(|text| text.len() < LINE_MAX as usize);
            let text = text.ok_or_else(|| {
                LabError::malformed(self.path, format!("is not a CSV trace: line {} is not text", self.number))
            })?;
            if !text.trim().is_empty() {
                return Ok(Some(text.trim().to_owned()));
            }
        }
    }
}
