//! The thread that encodes pictures, so that decoding goes on meanwhile: those of requests in their order, one after
//! the other.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

use larder_engine::{Picture, Sight, SightError};

use crate::decode::active::client::ClientWatch;
use crate::request::image::SeenPicture;

/// The pictures of a request, all of them encoded, or why they are not.
pub type EncodedPictures = Result<Vec<Picture>, SightError>;

/// Pictures that a request needs encoded.
struct EncodeTask {
    pictures: Vec<Arc<SeenPicture>>,
    watch: ClientWatch,
    to: Sender<EncodedPictures>,
}

/// The encoding thread. It ends when this is dropped, after the picture that it is at.
pub struct PictureEncoder {
    tasks: Option<Sender<EncodeTask>>,
    thread: Option<JoinHandle<()>>,
}

impl PictureEncoder {
    /// Starts the thread.
    pub fn start(sight: Arc<dyn Sight>) -> io::Result<Self> {
        let (to, tasks) = channel();
        let thread = thread::Builder::new().name("pictures".into()).spawn(move || encode_all(&*sight, &tasks))?;
        Ok(PictureEncoder { tasks: Some(to), thread: Some(thread) })
    }

    /// Has pictures encoded as long as the client wants its answer. If the thread has ended, nothing comes.
    pub fn encode(&self, pictures: Vec<Arc<SeenPicture>>, watch: ClientWatch) -> Receiver<EncodedPictures> {
        let (to, coming) = channel();
        if let Some(tasks) = &self.tasks {
            let _ = tasks.send(EncodeTask { pictures, watch, to });
        }
        coming
    }
}

impl Drop for PictureEncoder {
    fn drop(&mut self) {
        drop(self.tasks.take());
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn encode_all(sight: &dyn Sight, tasks: &Receiver<EncodeTask>) {
    for EncodeTask { pictures, watch, to } in tasks {
        // No request waits for what is not wanted.
        let wanted = pictures.iter().take_while(|_| watch.is_wanted());
        let encoded: EncodedPictures = wanted.map(|seen| encode(sight, seen)).collect();
        let _ = to.send(encoded);
    }
}

/// Encodes a picture from its file: what a tower reads takes far more memory.
fn encode(sight: &dyn Sight, seen: &SeenPicture) -> Result<Picture, SightError> {
    let encoded = sight.encode(&seen.file)?.encoded;
    // The prompt has the number that the picture had before.
    Ok(Picture { encoded, ..seen.picture.clone() })
}
