"""The routes of the public API: the table that its OpenAPI document is made from."""

from typing import Annotated, Any, Final

from msgspec import Meta

from isochrone.wire.http import public_bodies
from router.apis.batches.queued_runs import QueuedRequests
from router.apis.document import answers, forms
from router.apis.document.public_route import (
    BYTES,
    EVENTS,
    ORDERED_PAGE,
    PAGE,
    SOUND,
    TEXT,
    FileLimit,
    Order,
    PublicRoute,
)
from router.apis.media import schema as media
from router.apis.messages import schema as messages
from router.apis.openai import schema as openai
from router.apis.openai.moderations import MODERATIONS_PATH, ClassifyAnswer, ModerationRequest
from router.apis.responses.counting import INPUT_TOKENS_PATH, InputTokensRequest
from router.apis.responses.surface import RESPONSES_PATH
from router.apis.responses.translate import InputItem, ResponsesRequest
from router.apis.workers_ai.catalog import ModelQuery, PageQuery, SchemaQuery

NewItems = Annotated[list[InputItem], Meta(max_length=public_bodies.ITEMS_MAX)]


def _inference(path: str, summary: str, **fields: Any) -> PublicRoute:
    return PublicRoute(method="POST", path=path, summary=summary, is_inference=True, **fields)


INFERENCE: Final = (
    _inference(
        openai.CHAT_PATH,
        "Answer a chat",
        body=openai.ChatRequest,
        fields={"messages": openai.LinkedMessages},
        answer=answers.ChatAnswer,
        media_types=(EVENTS,),
    ),
    _inference(
        openai.COMPLETIONS_PATH,
        "Continue a prompt",
        body=openai.CompletionRequest,
        answer=answers.CompletionAnswer,
        media_types=(EVENTS,),
    ),
    _inference(
        openai.EMBEDDINGS_PATH,
        "Turn texts into vectors",
        body=openai.EmbeddingRequest,
        answer=answers.EmbeddingAnswer,
    ),
    _inference(
        openai.RERANK_PATH,
        "Sort documents by their relevance to a query",
        body=openai.RerankRequest,
        answer=answers.RerankAnswer,
    ),
    _inference(
        openai.CLASSIFY_PATH,
        "Return the classes of texts",
        body=openai.ClassifyRequest,
        answer=ClassifyAnswer,
    ),
    _inference(
        MODERATIONS_PATH,
        "Moderate texts by a model that classifies",
        body=ModerationRequest,
        answer=answers.ModerationAnswer,
    ),
    _inference(
        RESPONSES_PATH,
        "Create a response; one that is stored needs a scheduler",
        body=ResponsesRequest,
        answer=answers.ResponseAnswer,
        media_types=(EVENTS,),
    ),
    _inference(
        messages.MESSAGES_PATH,
        "Answer a conversation (Anthropic)",
        surface="anthropic",
        body=messages.MessagesRequest,
        answer=answers.MessageAnswer,
        media_types=(EVENTS,),
    ),
    _inference(
        messages.COUNT_TOKENS_PATH,
        "Count the tokens of a conversation (Anthropic)",
        surface="anthropic",
        body=messages.CountTokensRequest,
        answer=answers.TokenCountAnswer,
    ),
    _inference(
        INPUT_TOKENS_PATH,
        "Count the tokens of a response's input",
        body=InputTokensRequest,
        answer=answers.InputTokensAnswer,
    ),
    _inference(
        media.TRANSCRIPTIONS_PATH,
        "Write down what a sound says",
        body=media.TranscriptionRequest,
        files=("file",),
        answer=answers.TranscriptionAnswer,
        media_types=(TEXT, EVENTS),
    ),
    _inference(
        media.TRANSLATIONS_PATH,
        "Write down in English what a sound says",
        body=media.TranslationRequest,
        files=("file",),
        answer=answers.TranscriptionAnswer,
        media_types=(TEXT, EVENTS),
    ),
    _inference(
        media.SPEECH_PATH,
        "Speak a text",
        body=media.SpeechRequest,
        media_types=(SOUND, EVENTS),
    ),
    _inference(
        media.IMAGES_PATH,
        "Make images",
        body=media.ImageRequest,
        answer=answers.ImageAnswer,
        media_types=(EVENTS,),
    ),
)

STORED: Final = (
    PublicRoute(
        method="POST",
        path="/v1/files",
        summary="Upload a file for a batch",
        body=forms.FileForm,
        files=("file",),
        answer=answers.DescribedFile,
    ),
    PublicRoute(
        method="GET",
        path="/v1/files",
        summary="List files",
        query={"after": str, "limit": FileLimit, "order": Order, "purpose": str},
        answer=answers.DescribedFile,
        is_list=True,
    ),
    PublicRoute(
        method="GET",
        path="/v1/files/{file_id}",
        summary="Describe a file",
        answer=answers.DescribedFile,
    ),
    PublicRoute(
        method="DELETE",
        path="/v1/files/{file_id}",
        summary="Delete a file",
        answer=answers.DeletedObject,
    ),
    PublicRoute(
        method="GET",
        path="/v1/files/{file_id}/content",
        summary="Download a file",
        media_types=(BYTES,),
    ),
    PublicRoute(
        method="POST",
        path="/v1/batches",
        summary="Begin a batch",
        body=public_bodies.CreateBatch,
        answer=answers.DescribedBatch,
    ),
    PublicRoute(
        method="GET",
        path="/v1/batches",
        summary="List batches",
        query=PAGE,
        answer=answers.DescribedBatch,
        is_list=True,
    ),
    PublicRoute(
        method="GET",
        path="/v1/batches/{batch_id}",
        summary="Describe a batch",
        answer=answers.DescribedBatch,
    ),
    PublicRoute(
        method="POST",
        path="/v1/batches/{batch_id}/cancel",
        summary="Begin no further items of a batch",
        answer=answers.DescribedBatch,
    ),
    PublicRoute(
        method="GET",
        path="/v1/responses/{response_id}",
        summary="Return a stored response, or follow one",
        query={"stream": bool, "starting_after": Annotated[int, Meta(ge=0, le=999_999_999)]},
        answer=answers.ResponseAnswer,
        media_types=(EVENTS,),
    ),
    PublicRoute(
        method="DELETE",
        path="/v1/responses/{response_id}",
        summary="Delete a stored response",
        answer=answers.DeletedObject,
    ),
    PublicRoute(
        method="POST",
        path="/v1/responses/{response_id}/cancel",
        summary="End a background response",
        answer=answers.ResponseAnswer,
    ),
    PublicRoute(
        method="GET",
        path="/v1/responses/{response_id}/input_items",
        summary="List what a stored response was generated from",
        query=ORDERED_PAGE,
        answer=answers.ConversationItem,
        is_list=True,
    ),
    PublicRoute(
        method="POST",
        path="/v1/conversations",
        summary="Begin a conversation",
        body=public_bodies.CreateConversation,
        fields={"items": NewItems | None},
        answer=answers.DescribedConversation,
    ),
    PublicRoute(
        method="GET",
        path="/v1/conversations/{conversation_id}",
        summary="Describe a conversation",
        answer=answers.DescribedConversation,
    ),
    PublicRoute(
        method="POST",
        path="/v1/conversations/{conversation_id}",
        summary="Replace a conversation's metadata",
        body=public_bodies.UpdateConversation,
        answer=answers.DescribedConversation,
    ),
    PublicRoute(
        method="DELETE",
        path="/v1/conversations/{conversation_id}",
        summary="Delete a conversation",
        answer=answers.DeletedObject,
    ),
    PublicRoute(
        method="GET",
        path="/v1/conversations/{conversation_id}/items",
        summary="List the items of a conversation",
        query=ORDERED_PAGE,
        answer=answers.ConversationItem,
        is_list=True,
    ),
    PublicRoute(
        method="POST",
        path="/v1/conversations/{conversation_id}/items",
        summary="Append items to a conversation",
        body=public_bodies.AddItems,
        fields={
            "items": Annotated[
                list[InputItem], Meta(min_length=1, max_length=public_bodies.ITEMS_MAX)
            ]
        },
        answer=answers.ConversationItem,
        is_list=True,
    ),
    PublicRoute(
        method="GET",
        path="/v1/conversations/{conversation_id}/items/{item_id}",
        summary="Return an item of a conversation",
        answer=answers.ConversationItem,
    ),
    PublicRoute(
        method="DELETE",
        path="/v1/conversations/{conversation_id}/items/{item_id}",
        summary="Delete an item of a conversation",
        answer=answers.DescribedConversation,
    ),
)

OPEN_AND_LISTS: Final = (
    PublicRoute(
        method="GET",
        path="/v1/models",
        summary="List the models of this key; Anthropic's list with the header anthropic-version",
        answer=answers.ModelListAnswer,
    ),
    PublicRoute(
        method="GET",
        path="/v1/models/{model}",
        summary="Describe a model",
        answer=answers.ListedModel,
    ),
    PublicRoute(
        method="GET",
        path="/healthz",
        summary="Whether this router can serve",
        surface="open",
        answer=answers.HealthAnswer,
    ),
    PublicRoute(
        method="GET",
        path="/health",
        summary="The same as /healthz",
        surface="open",
        answer=answers.HealthAnswer,
    ),
    PublicRoute(
        method="GET",
        path="/openapi.json",
        summary="This document",
        surface="open",
        answer=dict[str, Any],
    ),
)

WORKERS_AI: Final = (
    _inference(
        "/ai/run/{model}",
        "Run a model; with queueRequest=true queue requests, or poll for their results",
        surface="workers_ai",
        body=QueuedRequests,
        query={"queueRequest": bool, "rejectIfBusy": bool},
        answer=Any,
        media_types=(EVENTS,),
    ),
    PublicRoute(
        method="GET",
        path="/ai/models/search",
        summary="List models",
        surface="workers_ai",
        query=ModelQuery,
        answer=list[answers.ListedRunModel],
    ),
    PublicRoute(
        method="GET",
        path="/ai/models/schema",
        summary="Return the JSON Schemas of a model's input and output",
        surface="workers_ai",
        query=SchemaQuery,
        answer=answers.ModelSchemas,
    ),
    PublicRoute(
        method="GET",
        path="/ai/tasks/search",
        summary="List tasks",
        surface="workers_ai",
        query=PageQuery,
        answer=list[answers.NamedEntry],
    ),
    PublicRoute(
        method="GET",
        path="/ai/authors/search",
        summary="List authors",
        surface="workers_ai",
        query=PageQuery,
        answer=list[answers.NamedEntry],
    ),
    PublicRoute(
        method="POST",
        path="/ai/tomarkdown",
        summary="Convert documents to Markdown",
        surface="workers_ai",
        body=forms.NoFields,
        files=("files",),
        answer=list[answers.ConvertedFile],
    ),
    PublicRoute(
        method="GET",
        path="/ai/tomarkdown/supported",
        summary="List the formats that can be converted",
        surface="workers_ai",
        answer=list[answers.ConvertibleFormat],
    ),
    PublicRoute(
        method="GET",
        path="/ai/finetunes",
        summary="List this tenant's LoRA adapters",
        surface="workers_ai",
        answer=list[answers.DescribedAdapter],
    ),
    PublicRoute(
        method="POST",
        path="/ai/finetunes",
        summary="Describe a LoRA adapter before its files are uploaded",
        surface="workers_ai",
        body=public_bodies.NewFinetune,
        answer=answers.DescribedAdapter,
    ),
    PublicRoute(
        method="GET",
        path="/ai/finetunes/public",
        summary="List the public LoRA adapters",
        surface="workers_ai",
        query={
            "limit": Annotated[int, Meta(ge=1, le=1000)],
            "offset": Annotated[int, Meta(ge=0, le=1_000_000)],
            "orderBy": str,
        },
        answer=list[answers.DescribedAdapter],
    ),
    PublicRoute(
        method="POST",
        path="/ai/finetunes/{finetune}/finetune-assets",
        summary="Upload a file of a LoRA adapter",
        surface="workers_ai",
        body=forms.AdapterForm,
        files=("file",),
        answer=answers.DescribedAdapter,
    ),
    PublicRoute(
        method="DELETE",
        path="/ai/finetunes/{finetune}",
        summary="Delete a LoRA adapter",
        surface="workers_ai",
        answer=dict[str, str],
    ),
)

ROUTES: Final = (*INFERENCE, *STORED, *OPEN_AND_LISTS, *WORKERS_AI)
